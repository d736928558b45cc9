"""The call of scaled_dot_product_attention."""

from collections.abc import Callable

from ejkernel.types.calls.softmax import SoftmaxCall
from ejkernel.types.calls.words import Array, AttentionMask, F, I
from ejkernel.types.masks.mask_info import MaskInfo


class ScaledDotProductAttention(SoftmaxCall):
    """Attention with few options, which vendor libraries can serve."""

    name = "scaled_dot_product_attention"
    outputs = ("batch q_len heads v_dim",)
    sequence_hint = "shard batch or heads, or use flash_attention, whose devices can share it"

    @staticmethod
    def signature(
        query: F[Array, "batch q_len heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
        cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
        *,
        mask_info: MaskInfo | None = None,
        attention_mask: AttentionMask | None = None,
        init_bias: Callable[[], Array] | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
    ) -> None: ...
