"""Scale, cap, window, dropout, sinks and cache scales."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.calls.settle.errors import MAX_LENGTH, invalid, out_of_range

Arguments = dict[str, Any]


def softmax_options(a: Arguments, query: str = "query") -> None:
    """Scale as a float, window as a tuple, a legal cap, a floating logits dtype."""
    scale = a["softmax_scale"]
    if scale is None:
        a["softmax_scale"] = float(max(a[query].shape[-1], 1)) ** -0.5
    elif isinstance(scale, (int, float)):
        if not _fits(scale):
            raise out_of_range("softmax_scale", "a finite number that float32 holds", scale)
        a["softmax_scale"] = float(scale)
    cap = a.get("logits_soft_cap")
    if isinstance(cap, (int, float)):
        if not (_fits(cap) and cap > 0 and _narrow(cap) > 0):
            legal = "a finite number > 0 that float32 holds, or None"
            raise out_of_range("logits_soft_cap", legal, cap)
        a["logits_soft_cap"] = float(cap)
    if "sliding_window" in a:
        a["sliding_window"] = window(a["sliding_window"])
    precision(a)
    for name in ("logits_dtype", "softmax_dtype", "dtype"):
        if a.get(name) is not None:
            a[name] = _float_dtype(
                name, a[name], lower_bound=name in ("logits_dtype", "softmax_dtype")
            )


def _narrow(value: float) -> float:
    """The number as logits see it: float32 unless JAX may use float64."""
    if jax.config.jax_enable_x64:  # ty: ignore[missing-attribute]
        return float(value)
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _fits(value: float) -> bool:
    """Finite, and still so as a float32 times log2(e), which kernels multiply logits by."""
    return math.isfinite(value) and math.isfinite(_narrow(value * math.log2(math.e)))


def precision(a: Arguments) -> None:
    """A precision that JAX knows by name."""
    name = a.get("precision")
    for one in name if isinstance(name, tuple) else (name,):
        if not isinstance(one, str) or one in jax.lax.DotAlgorithmPreset.__members__:
            continue
        try:
            jax.lax.Precision(one)
        except ValueError:
            legal = "default, high, highest, or a jax.lax.DotAlgorithmPreset"
            raise out_of_range("precision", legal, name) from None


def window(value: Any) -> tuple[int, int] | None:
    """``(left, right)``, both >= 0; wider than any array is as good as ``MAX_LENGTH``."""
    if value is None:
        return None
    sides = value if isinstance(value, tuple) else (value, value)
    left, right = (operator.index(side) for side in sides)
    if left < 0 or right < 0:
        raise out_of_range("sliding_window", "widths >= 0", value)
    return min(left, MAX_LENGTH), min(right, MAX_LENGTH)


def _float_dtype(name: str, value: Any, *, lower_bound: bool) -> np.dtype:
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise invalid(name, "a floating-point dtype", value) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise invalid(name, "a floating-point dtype", dtype.name)
    if not lower_bound:
        return dtype
    wide = dtype == np.float64 and jax.config.jax_enable_x64  # ty: ignore[missing-attribute]
    return np.dtype(np.float64 if wide else np.float32)


def dropout(a: Arguments) -> None:
    """A legal probability; the seed as int32, None where nothing is dropped."""
    prob = _probability(a)
    a["dropout_seed"] = _seed_array(a["dropout_seed"]) if prob else None


def dropout_from_key(a: Arguments) -> None:
    """As ``dropout``, the seed drawn from a PRNG key.

    ``dropout_rng`` becomes int32 ``[3]``: the seed, the first batch row and the first head.
    """
    prob = _probability(a)
    key = a["dropout_rng"]
    if a["deterministic"] or not prob:
        a.update(dropout_rng=None, dropout_prob=0.0, deterministic=True)
        return
    if key is None:
        raise ValueError(
            "dropout_rng: given None, expected a PRNG key: dropout is active "
            f"(dropout_prob={prob!r}, deterministic=False)"
        )
    if key.dtype == jnp.int32 and key.shape == (3,):
        return  # settled before
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and (key.dtype != jnp.uint32 or key.ndim != 1):
        raise invalid("dropout_rng", "a PRNG key: key[] or uint32[words]", key)
    if typed and key.ndim:
        raise invalid("dropout_rng", "a single PRNG key: key[]", key)
    seed = _seed_array(jax.random.bits(key, (), "uint32"))
    a["dropout_rng"] = jnp.stack([seed, jnp.int32(0), jnp.int32(0)])


def _probability(a: Arguments) -> float:
    prob = a["dropout_prob"]
    if not 0.0 <= prob < 1.0:
        raise out_of_range("dropout_prob", "0 <= dropout_prob < 1", prob)
    a["dropout_prob"] = float(prob)
    return a["dropout_prob"]


def _seed_array(seed: Any) -> jax.Array:
    """int32 with the low 32 bits of the seed; three of them on one shard of a larger call."""
    return jnp.asarray(0 if seed is None else seed).astype(jnp.uint32).astype(jnp.int32)


def local_seeds(a: Arguments, shard: Any, *names: str) -> None:
    """Settled seeds of one shard: the seed, its first batch row, its first head, all global."""
    for name in names:
        seed = a[name]
        if seed is None:
            continue
        words = seed if seed.ndim else jnp.stack([seed, jnp.int32(0), jnp.int32(0)])
        offsets = [jnp.int32(0), shard.offset("batch"), shard.offset("heads")]
        a[name] = words + jnp.stack(offsets)


def sinks(a: Arguments, query: str = "query") -> None:
    """Sinks as ``[heads, sinks]``; one axis means shared by all heads."""
    aux = a["softmax_aux"]
    if aux is not None and aux.ndim == 1:
        a["softmax_aux"] = jnp.broadcast_to(aux, (a[query].shape[-2], aux.shape[0]))


def head_scales(a: Arguments, *names: str, kv_heads: Any = "key_cache") -> None:
    """Scales of a cache fit its heads; they stay 0-d or ``[kv_heads]``.

    ``kv_heads`` is their number, the argument whose third axis says it, or None: 0-d only.
    """
    heads = a[kv_heads].shape[2] if isinstance(kv_heads, str) else kv_heads
    for name in names:
        scale = a[name]
        if scale is None:
            continue
        scale = jnp.asarray(scale)
        legal = "float[]" if heads is None else f"float[] or float[{heads}]"
        if scale.shape != () and (heads is None or scale.shape != (heads,)):
            raise invalid(name, legal, scale)
        a[name] = scale


def scalar_index(a: Arguments, name: str) -> None:
    """An index given as ``[]`` or ``[1]`` becomes int32 ``[]``."""
    if a[name] is not None:
        a[name] = jnp.asarray(a[name]).astype(jnp.int32).reshape(())


def count(a: Arguments, *names: str) -> None:
    """Numbers of things are at least 1."""
    for name in names:
        if a[name] is not None and a[name] < 1:
            raise out_of_range(name, "an integer >= 1", a[name])
