"""The call of attention."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.types.calls import canonicalize
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, AttentionMask, F, invalid
from ejkernel.types.masks.mask_info import MaskInfo


class Attention(Call):
    """Plain attention that also returns its weights."""

    name = "attention"
    outputs = ("batch q_len heads v_dim", "batch heads q_len kv_len")
    sequence_hint = "shard batch or heads, or use flash_attention, whose devices can share it"
    merged: ClassVar[Mapping[str, str]] = {
        **canonicalize.MERGED_MASKS,
        "init_bias": "bias",
        "deterministic": "dropout_prob",
    }

    @staticmethod
    def signature(
        query: F[Array, "batch q_len heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        dropout_rng: jax.Array | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        mask_info: MaskInfo | None = None,
        attention_mask: AttentionMask | None = None,
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

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """``dropout_rng`` becomes int32 ``[3]``: the seed, the first batch row, the first head."""
        super().canonicalize(a)
        prob, key = canonicalize.probability(a), a["dropout_rng"]
        if a["deterministic"] or not prob:
            a.update(dropout_rng=None, dropout_prob=0.0, deterministic=True)
            return
        if key is None:
            raise ValueError(
                "dropout_rng: given None, expected a PRNG key: dropout is active "
                f"(dropout_prob={prob!r}, deterministic=False)"
            )
        if key.dtype == jnp.int32 and key.shape == (3,):
            return  # canonical already
        typed = canonicalize.is_key(key)
        if not typed and (key.dtype != jnp.uint32 or key.ndim != 1):
            raise invalid("dropout_rng", "a PRNG key: key[] or uint32[words]", key)
        if typed and key.ndim:
            raise invalid("dropout_rng", "a single PRNG key: key[]", key)
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
        if not typed and key.shape != words:
            raise invalid("dropout_rng", f"a PRNG key: key[] or uint32{list(words)}", key)
        seed = canonicalize.seed_array(jax.random.bits(key, (), "uint32"))
        a["dropout_rng"] = jnp.stack([seed, jnp.int32(0), jnp.int32(0)])

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None:
        canonicalize.local_seeds(a, shard, "dropout_rng")
