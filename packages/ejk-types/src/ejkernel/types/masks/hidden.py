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
from ejkernel.types.masks.fields import MaskFields, has_positions, per_head
from ejkernel.types.masks.rules import both, largest, smallest


def seen_keys(terms: Sequence[MaskFields], q_len: Any, kv_len: Any) -> Any | None:
    """Keys that some query may see under every one of ``terms``, bool ``[#b, #kv_len]``.

    Conservative: padding ids, dense masks and rules by index count, each alone. None: all keys.
    The arrays of ``terms`` may be padded; symbolic lengths have no rules by index.
    """
    seen = None
    for term in terms:
        if term.attention_mask is not None:
            seen = both(seen, as_bool(term.attention_mask).any(axis=(1, 2))[:, :kv_len])
        if term.kv_segment_ids is not None:
            seen = both(seen, (per_head(term.kv_segment_ids) >= 0).any(axis=1)[:, :kv_len])
        seen = both(seen, _by_index(term, q_len, kv_len))
    return seen


def _by_index(term: MaskFields, q_len: Any, kv_len: Any) -> np.ndarray | None:
    static = isinstance(q_len, int) and isinstance(kv_len, int)
    if term.rule.trivial or has_positions(term) or not static:
        return None
    first, last = term.rule.query_bounds(np.arange(kv_len, dtype=np.int32))
    seen = np.ones(kv_len, bool)
    if first is not None:
        seen &= first < q_len
    if last is not None:
        seen &= last >= 0
    return None if seen.all() else seen[None]


def may_see_nothing(terms: Sequence[MaskFields], q_len: Any, kv_len: Any) -> bool:
    """Returns whether some query may see no key: never by a causal mask alone, always by arrays."""
    if not (isinstance(q_len, int) and isinstance(kv_len, int)):
        return True
    low, high = np.zeros(q_len, np.int32), np.full(q_len, kv_len - 1, np.int32)
    for term in terms:
        if term.attention_mask is not None or term.q_segment_ids is not None or has_positions(term):
            return True
        first, last = term.rule.key_bounds(np.arange(q_len, dtype=np.int32))
        low, high = largest(low, first), smallest(high, last)
    return bool((low > high).any())


def clear_dead_rows(
    mask: MaskFields,
    kv_len: Any,
    lse: jax.Array,
    q: jax.Array,
    do: jax.Array,
    dlse: jax.Array,
    *,
    biased: bool,
) -> tuple[jax.Array, ...]:
    """Returns q, do ``[b, q, h, ...]`` and dlse ``[b, h, q]``, zeros in rows that see no key.

    Their weights are 0, but 0 * NaN would reach the keys' gradients. lse ``[b, h, q]`` is -inf
    there. Free where the mask leaves every row a key. ``biased``: whether a bias of -inf may hide
    the keys of one head.
    """
    terms = mask.terms
    if not may_see_nothing(terms, q.shape[1], kv_len):
        return q, do, dlse
    alive = lse != -jnp.inf
    if not biased and all(term.attention_mask is None for term in terms):
        # one value for all heads, which XLA need not spread over the columns of joined heads
        alive = jnp.any(alive, axis=1, keepdims=True)
    return clear_rows_unless(alive, q, do, dlse)


def clear_rows_unless(
    alive: jax.Array, q: jax.Array, do: jax.Array, dlse: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns q, do ``[b, q, h, ...]`` and dlse ``[b, h, q]``, zero unless alive ``[b, #h, q]``."""
    return *clear_unless(jnp.swapaxes(alive, 1, 2), q, do), *clear_unless(alive, dlse)


def clear_unless(flags: Any | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays with zeros where ``flags``, of their first axes, is False; None: as is."""
    if flags is None:
        return arrays

    def clear(x: jax.Array) -> jax.Array:
        trailing = tuple(range(flags.ndim, x.ndim))
        return jnp.where(jnp.expand_dims(flags, trailing), x, jnp.zeros((), x.dtype))

    return tuple(map(clear, arrays))
