"""The recurrence, one token after the other: for decoding a few tokens.

    H = exp(decay_t) H + k_t v_t^T        o_t = q_t H

O(s dk dv) memory when differentiated, hence for short calls only; ``core`` is for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.packed import packing
from ejkernel.kernels.xla.linear_attention.chunk import Rows


def _decayed(state: jax.Array, row: Rows) -> jax.Array:
    for gate, axis in ((row.key, -1), (row.scalar, -1), (row.value, -2)):
        if gate is not None:
            state = state * jnp.exp(jnp.expand_dims(gate, axis))
    return state


def advance(state: jax.Array, row: Rows) -> tuple[jax.Array, jax.Array]:
    """``state`` [.., h, dk, dv] and a row [.., h, channels] -> the next state and the output."""
    state = _decayed(state, row) + row.k[..., :, None] * row.v[..., None, :]
    return state, jnp.einsum("...d,...de->...e", row.q, state)


def stepwise(
    rows: Any,
    table: jax.Array,
    cu_seqlens: jax.Array | None,
    *,
    advance: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    reverse: bool,
) -> tuple[jax.Array, jax.Array]:
    """Outputs ``[batch, seq, head, dv]`` and final states ``[b or n, head, dk, dv]``.

    ``advance(state, row)`` gives the next state and the output of one token.
    """
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), rows)
    if cu_seqlens is None:
        final, o = jax.lax.scan(advance, table, by_time, reverse=reverse)
        return jnp.moveaxis(o, 0, 1), final

    n, length = cu_seqlens.shape[0] - 1, rows.q.shape[1]
    sequence = packing(cu_seqlens, length).sequence
    # rows past the last sequence change nothing, whatever they hold
    is_valid = sequence < n
    by_time = jax.tree.map(
        lambda x: jnp.where(is_valid.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype)),
        by_time,
    )

    def advance_sequence(states, at):
        row, m = at
        state, o = advance(states.at[m].get(mode="clip")[None], row)
        return states.at[m].set(state[0], mode="drop"), jnp.where(m < n, o, 0)

    final, o = jax.lax.scan(advance_sequence, table, (by_time, sequence), reverse=reverse)
    return jnp.moveaxis(o, 0, 1), final
