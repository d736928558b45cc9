"""Checks and canonicalization of arguments inside the trace.

``BY_NAME`` has the function for each argument name; rules of a single operation stand with
it. All take the arguments by name in a dict, change it in place and leave canonical ones: a float
scale, a window tuple, one MaskInfo, sinks ``[heads, sinks]``, an int32 seed.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import MAX_LENGTH
from ejkernel.types.calls.arguments import lengths_name
from ejkernel.types.calls.words import invalid, out_of_range
from ejkernel.types.masks.combine import mask_of, mask_of_rule
from ejkernel.types.masks.fields import checked_rule

Arguments = dict[str, Any]

_NO_MASK = {
    "attention_mask": None,
    "causal": False,
    "causal_offset": 0,
    "sliding_window": None,
    "chunk_size": None,
}
MERGED_MASKS = dict.fromkeys(_NO_MASK, "mask_info")
"""The arguments that ``_masks`` moves into ``mask_info``, as ``Call.merged`` has them.

In a packed call they keep their values: a kernel that reads the cumulative lengths gets them
joined with all of these by ``combine.mask_of``.
"""


def _query(a: Arguments) -> Any:
    return a["query"] if "query" in a else a["queries"]


# ---- heads, sequences ---------------------------------------------------------------------------


def check_groups(name: str, heads: int, kv_heads: int, value: Any) -> None:
    """Query head i reads key head ``i // (heads // kv_heads)``."""
    if heads % kv_heads if kv_heads else heads:
        legal = f"kv_heads that divide the {heads} query heads ({kv_heads} do not)"
        raise invalid(name, legal, value)


def _grouped_heads(a: Arguments) -> None:
    name = next(name for name in ("key", "key_cache", "keys") if name in a)
    check_groups(name, _query(a).shape[-2], a[name].shape[-2], a[name])


def _packed_pair(a: Arguments) -> None:
    """Cumulative lengths of queries and keys: batch 1, the same sequences, k not alone."""
    q, k = a["cum_seqlens_q"], a["cum_seqlens_k"]
    if q is None:
        if k is not None:
            raise ValueError("cum_seqlens_k: given without cum_seqlens_q, expected both or neither")
        return
    _packed(a, "cum_seqlens_q")
    if k is None and a["query"].shape[1] != a["key"].shape[1]:
        raise invalid(
            "cum_seqlens_k",
            f"an array, since q_len {a['query'].shape[1]} and kv_len {a['key'].shape[1]} differ",
            k,
        )
    if k is not None and k.shape != q.shape:
        raise invalid("cum_seqlens_k", f"as many sequences as cum_seqlens_q, int{list(q.shape)}", k)


def _packed(a: Arguments, name: str = "cu_seqlens") -> None:
    at_least_one(a, name)
    if a[name] is not None and a["query"].shape[0] != 1:
        raise invalid("query", f"batch 1 with {name}", a["query"])


def at_least_one(a: Arguments, name: str) -> None:
    """Cumulative lengths have a first entry."""
    if a[name] is not None and a[name].shape[0] < 1:
        raise invalid(name, "int[sequences + 1], at least one entry", a[name])


def _row_starts(a: Arguments) -> None:
    lengths = lengths_name(a)
    n, starts = a[lengths].shape[0], a["query_start_loc"]
    if starts.shape != (n + 1,):
        raise invalid("query_start_loc", f"int[{n + 1}], one more than {lengths}", starts)


# ---- options ------------------------------------------------------------------------------------


def _softmax_options(a: Arguments) -> None:
    """Scale as a float, window as a tuple, a legal cap, a floating logits dtype."""
    scale = a["softmax_scale"]
    if scale is None:
        a["softmax_scale"] = float(max(_query(a).shape[-1], 1)) ** -0.5
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
        a["sliding_window"] = _window(a["sliding_window"])
    precision(a)
    for name in ("logits_dtype", "softmax_dtype", "dtype"):
        if a.get(name) is not None:
            a[name] = float_dtype(name, a[name])
    for name in ("logits_dtype", "softmax_dtype"):  # lower bounds
        if a.get(name) is not None:
            wide = a[name] == np.float64 and jax.config.jax_enable_x64  # ty: ignore[missing-attribute]
            a[name] = np.dtype(np.float64 if wide else np.float32)


def _narrow(value: float) -> float:
    """Returns the value in the precision of logits: float32 unless JAX may use float64."""
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
    for level in name if isinstance(name, tuple) else (name,):
        if not isinstance(level, str) or level in jax.lax.DotAlgorithmPreset.__members__:
            continue
        try:
            jax.lax.Precision(level)
        except ValueError:
            legal = "default, high, highest, or a jax.lax.DotAlgorithmPreset"
            raise out_of_range("precision", legal, name) from None


def _window(value: Any) -> tuple[int, int] | None:
    """``(left, right)``, both >= 0; wider than any array is as good as ``MAX_LENGTH``."""
    if value is None:
        return None
    sides = value if isinstance(value, tuple) else (value, value)
    left, right = (operator.index(side) for side in sides)
    if left < 0 or right < 0:
        raise out_of_range("sliding_window", "widths >= 0", value)
    return min(left, MAX_LENGTH), min(right, MAX_LENGTH)


def float_dtype(name: str, value: Any) -> np.dtype:
    """The dtype that ``value`` names."""
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise invalid(name, "a floating-point dtype", value) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise invalid(name, "a floating-point dtype", dtype.name)
    return dtype


def positive(a: Arguments, name: str, legal: str = "an integer >= 1") -> None:
    """Checks that a count, where one is given, is at least 1."""
    if a[name] is not None and a[name] < 1:
        raise out_of_range(name, legal, a[name])


def scalar_index(a: Arguments, name: str) -> None:
    """An index given as ``[]`` or ``[1]`` becomes int32 ``[]``."""
    if a[name] is not None:
        a[name] = jnp.asarray(a[name]).astype(jnp.int32).reshape(())


def _sinks(a: Arguments) -> None:
    """Sinks as ``[heads, sinks]``; one axis means shared by all heads."""
    aux = a["softmax_aux"]
    if aux is not None and aux.ndim == 1:
        a["softmax_aux"] = jnp.broadcast_to(aux, (_query(a).shape[-2], aux.shape[0]))


def _cache_scales(a: Arguments) -> None:
    """Scales are 0-d arrays, or of a cache with key heads one a head."""
    if "key" in a:
        return  # no cache: see ``scaled_operands``
    of_heads = {"key_cache": 1, "keys": 1, "kv_pages": 2}  # how many rows of a token a head has
    heads = next((a[name].shape[-2] // n for name, n in of_heads.items() if name in a), None)
    for name in ("q_scale", "k_scale", "v_scale"):
        if a.get(name) is None:
            continue
        scale = a[name] = jnp.asarray(a[name])
        shapes = ((),) if heads is None or name == "q_scale" else ((), (heads,))
        if scale.shape not in shapes:
            raise invalid(name, " or ".join(f"float{list(shape)}" for shape in shapes), scale)


# ---- dropout ------------------------------------------------------------------------------------


def _dropout(a: Arguments) -> None:
    """A legal probability; the seed as int32, None where nothing is dropped."""
    prob = probability(a)
    a["dropout_seed"] = seed_array(a["dropout_seed"]) if prob else None


def probability(a: Arguments) -> float:
    """``dropout_prob``, checked."""
    prob = a["dropout_prob"]
    if not 0.0 <= prob < 1.0:
        raise out_of_range("dropout_prob", "0 <= dropout_prob < 1", prob)
    a["dropout_prob"] = float(prob)
    return a["dropout_prob"]


def seed_array(seed: Any) -> jax.Array:
    """int32 with the low 32 bits of the seed; three of them on one shard of a larger call.

    Of a typed PRNG key: ``jax.random.bits(key, (), "uint32")``.
    """
    if seed is not None and is_key(seed):
        seed = jax.random.bits(seed, (), "uint32")
    return jnp.asarray(0 if seed is None else seed).astype(jnp.uint32).astype(jnp.int32)


def is_key(x: Any) -> bool:
    """True for an array of typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def local_seeds(a: Arguments, shard: Any, *names: str) -> None:
    """Replaces each seed by (seed, first batch row, first head of the shard), all global."""
    for name in names:
        seed = a[name]
        if seed is None:
            continue
        words = seed if seed.ndim else jnp.stack([seed, jnp.int32(0), jnp.int32(0)])
        offsets = [jnp.int32(0), shard.offset("batch"), shard.offset("heads")]
        a[name] = words + jnp.stack(offsets)


# ---- masks --------------------------------------------------------------------------------------


def _masks(a: Arguments) -> None:
    """Merges every constraint of the call into ``mask_info`` and clears the merged arguments.

    Packed calls are the exception: there causal and window rules count inside the sequences, so
    the implementation joins all of them with the cumulative lengths at once, and ``mask_info`` is
    only checked.
    """
    if a.get("chunk_size") is not None:
        positive(a, "chunk_size")
    packed = a.get("cum_seqlens_q", a.get("cu_seqlens")) is not None
    constraints = {name: a[name] for name in _NO_MASK if name in a and not packed}
    if a["mask_info"] is None and constraints.get("attention_mask") is None:
        numbers = {**_NO_MASK, **constraints}
        del numbers["attention_mask"]
        a["mask_info"] = mask_of_rule(checked_rule(**numbers))
    else:
        masked = {name: a[name] for name in ("query", "key", "key_value", "mask_info") if name in a}
        a["mask_info"] = mask_of(masked | constraints)
    a.update({name: _NO_MASK[name] for name in constraints})


BY_NAME = {
    "key": _grouped_heads,
    "key_cache": _grouped_heads,
    "keys": _grouped_heads,
    "cum_seqlens_q": _packed_pair,
    "cu_seqlens": _packed,
    "query_start_loc": _row_starts,
    "softmax_scale": _softmax_options,
    "num_splits": lambda a: positive(a, "num_splits"),
    "dropout_seed": _dropout,
    "softmax_aux": _sinks,
    "k_scale": _cache_scales,
    "attention_mask": _masks,
}
"""What is done with an argument of this name, in this order."""
