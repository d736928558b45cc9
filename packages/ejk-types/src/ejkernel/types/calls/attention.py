"""The call of attention."""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from ejkernel.types.calls import settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, Flags
from ejkernel.types.mask_info import MaskInfo


class Attention(Call):
    """Plain attention that also returns its weights."""

    name = "attention"
    outputs = ("batch q_len heads v_dim", "batch heads q_len kv_len")

    @staticmethod
    def takes(
        query: F[Array, "batch q_len heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        dropout_rng: jax.Array | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        mask_info: MaskInfo | None = None,
        attention_mask: Flags[Array, "#batch #heads #q_len #kv_len"]
        | Flags[Array, "#batch q_len kv_len"]
        | Flags[Array, "#batch kv_len"]
        | None = None,
        init_bias: Callable[[], Array] | None = None,
        deterministic: bool = True,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        dtype: DTypeLike | None = None,
        softmax_dtype: DTypeLike | None = None,
        dropout_prob: float = 0.0,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        precision: jax.lax.PrecisionLike = None,
    ) -> None: ...

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.build_bias(a)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a)
        settle.softmax_options(a)
        settle.dropout_from_key(a)
        settle.sinks(a)
        settle.masks(a)

    @classmethod
    def localise(cls, a: Arguments, shard: Any) -> None:
        settle.local_seeds(a, shard, "dropout_rng")
