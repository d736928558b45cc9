"""Arguments of attention as kernels receive them: canonical already, or straight from a user.

Every kernel's public function may be called without the module layer; then the checks and
defaults here are the only ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.errors import InvalidArgument


def _form(x: Any) -> str:
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]" if hasattr(x, "shape") else repr(x)


def invalid(argument: str, expected: str, given: Any) -> InvalidArgument:
    return InvalidArgument(f"{argument}: expected {expected}, got {_form(given)}")


def float_array(x: Any, argument: str, axes: str) -> jax.Array:
    """``x`` as a jax float array of the rank that ``axes`` spells."""
    expected = f"float[{', '.join(axes.split())}]"
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise invalid(argument, expected, x)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim != len(axes.split()):
        raise invalid(argument, expected, x)
    return x


def query_key_value(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checked ``[b, q, h, d]``, ``[b, k, hk, d]``, ``[b, k, hk, dv]`` with h a multiple of hk."""
    q = float_array(query, "query", "batch q_len heads head_dim")
    k = float_array(key, "key", "batch kv_len kv_heads head_dim")
    v = float_array(value, "value", "batch kv_len kv_heads value_dim")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise invalid("key", f"float[{q.shape[0]}, kv_len, kv_heads, {q.shape[3]}]", k)
    if v.shape[:3] != k.shape[:3]:
        expected = f"float[{', '.join(map(str, k.shape[:3]))}, value_dim] as the key"
        raise invalid("value", expected, v)
    h, hk = q.shape[2], k.shape[2]
    if (hk == 0 and h != 0) or (hk and h % hk):
        raise InvalidArgument(
            f"query: {h} heads are not a multiple of the {hk} key/value heads of key {_form(k)}"
        )
    return q, k, v


def bias_array(bias: Any, q: jax.Array, k: jax.Array) -> jax.Array | None:
    """Checked ``[#b, #h, #q, k]`` or None."""
    if bias is None:
        return None
    bias = float_array(bias, "bias", "batch heads q_len kv_len")
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    loose = any(n not in (1, m) for n, m in zip(bias.shape[:3], full[:3], strict=True))
    if loose or bias.shape[3] != full[3]:
        expected = f"float[{full[0]} or 1, {full[1]} or 1, {full[2]} or 1, {full[3]}]"
        raise invalid("bias", expected, bias)
    return bias


def bias_of_rows(bias: jax.Array | None, q_len: int) -> jax.Array | None:
    """The bias with a row for every query, for kernels that read whole tiles of it."""
    if bias is None or bias.shape[2] == q_len:
        return bias
    return jnp.broadcast_to(bias, (*bias.shape[:2], q_len, bias.shape[3]))


def sink_array(sinks: Any, heads: int) -> jax.Array | None:
    """``[h, n]``; a 1-D array is shared by all heads."""
    if sinks is None:
        return None
    if getattr(sinks, "ndim", None) == 1:
        sinks = float_array(sinks, "softmax_aux", "num_sinks")
        return jnp.broadcast_to(sinks, (heads, sinks.shape[0]))
    sinks = float_array(sinks, "softmax_aux", "heads num_sinks")
    if sinks.shape[0] != heads:
        raise invalid("softmax_aux", f"float[{heads}, num_sinks] or float[num_sinks]", sinks)
    return sinks


def scale_of(softmax_scale: Any, head_dim: int) -> float:
    """The static logit scale; None = head_dim ** -0.5."""
    if softmax_scale is None:
        return float(head_dim) ** -0.5 if head_dim else 1.0
    if isinstance(softmax_scale, jax.Array) or getattr(softmax_scale, "ndim", 0):
        raise invalid("softmax_scale", "a Python float or None", softmax_scale)
    return float(softmax_scale)


def soft_cap_of(logits_soft_cap: Any) -> float | None:
    if logits_soft_cap is None:
        return None
    if not float(logits_soft_cap) > 0:
        raise ValueError(f"logits_soft_cap: must be greater than 0, got {logits_soft_cap}")
    return float(logits_soft_cap)


def probability(dropout_prob: Any) -> float:
    if not 0.0 <= float(dropout_prob) < 1.0:
        raise ValueError(f"dropout_prob: must be in [0, 1), got {dropout_prob}")
    return float(dropout_prob)


def sink_logit(sinks: jax.Array | None) -> jax.Array | None:
    """All sinks of a head as one logit, float32 ``[1, h]``: their sum of exponentials is one."""
    if sinks is None or sinks.shape[1] == 0:
        return None
    return jax.nn.logsumexp(sinks.astype(jnp.float32), axis=-1)[None]


def seed_words(seed: Any) -> jax.Array:
    """int32 ``[1, 3]``: seed, global index of batch row 0, global index of head 0."""
    if seed is None or isinstance(seed, (int, np.integer)):
        word = int(seed or 0) & 0xFFFFFFFF
        words = np.array([word, 0, 0], np.uint32).view(np.int32)
        return jnp.asarray(words)[None]
    words = jnp.asarray(seed)
    if not jnp.issubdtype(words.dtype, jnp.integer) or words.shape not in ((), (3,)):
        raise invalid("dropout_seed", "an int or integer[]", words)
    words = jax.lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32)
    return (words if words.ndim else jnp.stack([words, words * 0, words * 0]))[None]


def field(source: Any, name: str, default: Any = None) -> Any:
    """``source.name`` or ``source[name]``; ``default`` when absent or None."""
    if source is None:
        return default
    value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    return default if value is None else value
