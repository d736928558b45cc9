"""The call of ring_attention."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.types import softmax
from ejkernel.types.calls import settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I
from ejkernel.types.mask_info import MaskInfo


class RingAttention(Call):
    """Attention with the sequence axis spread over devices, and the zigzag layout helpers."""

    name = "ring_attention"
    outputs = ("batch q_len heads v_dim", "batch q_len heads")
    asks_for_more = "return_lse"
    seeds = ("dropout_seed",)

    @staticmethod
    def takes(
        query: F[Array, "batch q_len heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        bias: F[Array, "#batch #heads #q_len kv_total"] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        axis_name: str,
        mask_info: MaskInfo | None = None,
        q_segment_ids: I[Array, "#batch q_len"] | None = None,
        kv_segment_ids: I[Array, "#batch kv_len"] | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | I[Array, ""] | None = None,
        layout: Literal["contiguous", "zigzag"] = "contiguous",
        return_lse: bool = False,
        precision: jax.lax.PrecisionLike = None,
        logits_dtype: DTypeLike = jnp.float32,
    ) -> None: ...

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a)
        settle.ring_layout(a)
        settle.softmax_options(a)
        settle.dropout(a)
        settle.sinks(a)
        settle.ring_masks(a)

    @classmethod
    def named(cls, outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        return softmax.named(*outputs), softmax.named_lse(saved)
