"""Keys that no query sees and rows that see no key, as far as the mask alone shows it.

No pair is looked at. Such keys and rows may hold any value, NaN included: 0 * NaN is NaN, so they
must be replaced before they are multiplied by a probability of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import as_bool
from ejkernel.types.masks.fields import MaskFields, is_placed, per_head
from ejkernel.types.masks.rules import both, largest, smallest


def seen_keys(parts: Sequence[MaskFields], q_len: Any, kv_len: Any) -> Any | None:
    """Keys that some query may see under every one of ``parts``, bool ``[#b, #kv_len]``.

    Conservative: padding ids, dense masks and rules by index count, each alone. None: all keys.
    The arrays of ``parts`` may be padded; symbolic lengths have no rules by index.
    """
    seen = None
    for part in parts:
        if part.attention_mask is not None:
            seen = both(seen, as_bool(part.attention_mask).any(axis=(1, 2))[:, :kv_len])
        if part.kv_segment_ids is not None:
            seen = both(seen, (per_head(part.kv_segment_ids) >= 0).any(axis=1)[:, :kv_len])
        seen = both(seen, _by_index(part, q_len, kv_len))
    return seen


def _by_index(part: MaskFields, q_len: Any, kv_len: Any) -> np.ndarray | None:
    static = isinstance(q_len, int) and isinstance(kv_len, int)
    if part.rule.trivial or is_placed(part) or not static:
        return None
    first, last = part.rule.query_bounds(np.arange(kv_len, dtype=np.int32))
    seen = np.ones(kv_len, bool)
    if first is not None:
        seen &= first < q_len
    if last is not None:
        seen &= last >= 0
    return None if seen.all() else seen[None]


def may_see_nothing(parts: Sequence[MaskFields], q_len: Any, kv_len: Any) -> bool:
    """Returns whether some query may see no key: never by a causal mask alone, always by arrays."""
    if not (isinstance(q_len, int) and isinstance(kv_len, int)):
        return True
    low, high = np.zeros(q_len, np.int32), np.full(q_len, kv_len - 1, np.int32)
    for part in parts:
        if part.attention_mask is not None or part.q_segment_ids is not None or is_placed(part):
            return True
        first, last = part.rule.key_bounds(np.arange(q_len, dtype=np.int32))
        low, high = largest(low, first), smallest(high, last)
    return bool((low > high).any())


def without_dead_rows(
    mask: MaskFields,
    kv_len: Any,
    lse: jax.Array,
    q: jax.Array,
    do: jax.Array,
    dlse: jax.Array,
    *,
    biased: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, do ``[b, q, h, ...]`` and dlse ``[b, h, q]`` with zeros in rows that see no key.

    Their weights are 0, but 0 * NaN would reach the keys' gradients. lse ``[b, h, q]`` is -inf
    there. Free where the mask leaves every row a key. ``biased``: whether a bias of -inf may hide
    the keys of one head.
    """
    parts = mask.terms
    if not may_see_nothing(parts, q.shape[1], kv_len):
        return q, do, dlse
    alive = lse != -jnp.inf
    if not biased and all(part.attention_mask is None for part in parts):
        # one value for all heads, which XLA need not spread over the columns of joined heads
        alive = jnp.any(alive, axis=1, keepdims=True)
    return _rows_kept(alive, q, do, dlse)


def cleared_rows(
    lse: jax.Array, q: jax.Array, do: jax.Array, dlse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Clears rows as ``without_dead_rows`` does, whatever the mask."""
    return _rows_kept(lse != -jnp.inf, q, do, dlse)


def _rows_kept(
    alive: jax.Array, q: jax.Array, do: jax.Array, dlse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q, do and dlse with zeros where ``alive`` ``[b, #h, q]`` is False."""
    rows = jnp.swapaxes(alive, 1, 2)[..., None]
    q, do = (jnp.where(rows, x, jnp.zeros((), x.dtype)) for x in (q, do))
    return q, do, jnp.where(alive, dlse, 0.0)


def cleared(seen: Any | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """``arrays`` ``[b, k, ...]`` with zeros where ``seen`` ``[#b, #k]`` is False."""
    if seen is None:
        return arrays
    return tuple(
        jnp.where(jnp.expand_dims(seen, tuple(range(2, x.ndim))), x, jnp.zeros((), x.dtype))
        for x in arrays
    )
