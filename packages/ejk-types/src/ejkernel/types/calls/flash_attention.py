"""The call of flash_attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ejkernel.types import mods
from ejkernel.types.calls.softmax import SoftmaxCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, AttentionMask, F, I, Key
from ejkernel.types.masks.mask_info import MaskInfo


class FlashAttention(SoftmaxCall):
    """Exact attention in linear memory."""

    name = "flash_attention"
    seeds = ("dropout_seed",)

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
        score_mod: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
    ) -> None: ...

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        """Functions of a logit's indices become programs and the arrays they close over."""
        super().check_values(a)
        if a["score_mod"] is not None:
            a["score_mod"] = mods.trace_mod(mods.SCORE, a["score_mod"], _logits_dtype(a))
        if a["mask_mod"] is not None:
            a["mask_mod"] = mods.trace_mod(mods.MASK, a["mask_mod"])

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None:
        super().to_shard(a, shard)
        for name in mods.MODS:
            if a[name] is not None:
                a[name] = a[name].on_shard(shard.offset("batch"), shard.offset("heads"))


def _logits_dtype(a: Arguments) -> np.dtype:
    """Returns the dtype of the scores that a score_mod gets."""
    wide = jax.config.jax_enable_x64  # ty: ignore[missing-attribute]
    dtypes = [a[name].dtype for name in ("query", "key", "value")]
    dtypes.append(np.dtype(a["logits_dtype"]))
    return np.dtype(np.float64 if wide and np.dtype(np.float64) in dtypes else np.float32)
