"""The call of flash_attention."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.types.calls.softmax import SoftmaxCall
from ejkernel.types.calls.words import Array, AttentionMask, F, I, Key
from ejkernel.types.masks.mask_info import MaskInfo


class FlashAttention(SoftmaxCall):
    """Exact attention in linear memory."""

    name = "flash_attention"
    seeds = ("dropout_seed",)
    sequence_axes = ("q_len", "kv_len")

    @staticmethod
    def signature(
        query: F[Array, "batch q_len heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
        cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        mask_info: MaskInfo | None = None,
        attention_mask: AttentionMask | None = None,
        softmax_scale: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        return_lse: bool = False,
        precision: jax.lax.PrecisionLike = None,
        logits_dtype: DTypeLike = jnp.float32,
    ) -> None: ...
