"""The call of lightning_attention."""

from ejkernel.types.calls import settle
from ejkernel.types.calls.linear import LinearCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, F, I


class LightningAttention(LinearCall):
    """Linear attention whose decay depends on head and layer."""

    name = "lightning_attention"
    algorithm = "lightning_attn"

    @staticmethod
    def takes(
        query: F[Array, "batch seq heads key_dim"],
        key: F[Array, "batch seq kv_heads key_dim"],
        value: F[Array, "batch seq kv_heads v_dim"],
        initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        layer_idx: int,
        num_layers: int,
        softmax_scale: float | None = None,
        reverse: bool = False,
        return_state: bool = False,
    ) -> None: ...

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        LinearCall.canonicalise(a)
        settle.layer(a)
