"""One token of the gated delta rule.

Bound: the state is read and written once per token, which limits decoding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla.gated_delta_rule.chunk import Rows
from ejkernel.kernels.xla.gated_delta_rule.solve import PRECISION


def _read(x: jax.Array, state: jax.Array) -> jax.Array:
    return jnp.einsum("...d,...de->...e", x, state, precision=PRECISION)


def advance(state: jax.Array, row: Rows) -> tuple[jax.Array, jax.Array]:
    """``state`` [.., h, dk, dv] and a row [.., h, channels] -> the next state and the output."""
    if row.gate is not None:
        state = state * jnp.exp(row.gate[..., None])
    update = row.beta * (row.v - _read(row.k, state))
    state = state + row.k[..., :, None] * update[..., None, :]
    return state, _read(row.q, state)
