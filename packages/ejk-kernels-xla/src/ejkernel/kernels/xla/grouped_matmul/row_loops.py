"""The two grouped matmuls over runs of rows, as loops over row tiles.

    rows_matmul       out[r] = lhs[r] @ rhs[group of r]                    [m, n]
    groups_matmul     out[i] = sum of outer(lhs[r], rhs[r]) over run i     [g, k, n]

Group i owns the rows ``starts[i] : ends[i]``; ends are at most m, and rows no group owns give
nothing. A run is cut into tiles of ``tile`` rows; the loop visits exactly the tiles there are, so
the work is that of the rows, m + g * tile / 2 of them on average, whatever the group sizes.

Bound: 2 m k n flops. On a CPU the tile keeps [tile, k] and [tile, n] in the cache next to one
[k, n] matrix, which is read once per tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.varying import vary, varying_axes
from ejkernel.types.arrays import at_most, is_symbolic, result_dtype


@dataclass(frozen=True)
class Plan:
    """Static properties of a grouped matmul.

    ``transposed``: the matrices are ``[g, n, k]``. ``tile``: rows per step. ``dtype``: of the
    accumulation and the result. ``alone``: a row times its matrix is a step of its own, so that its
    bits follow from no other row, nor from its place in a tile.
    """

    tile: int
    transposed: bool
    precision: Any
    dtype: Any
    alone: bool = False

    def flipped(self) -> Plan:
        return replace(self, transposed=not self.transposed)

    def dot(self, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        dims = (((contract[0],), (contract[1],)), ((), ()))
        operand = result_dtype(a, b)
        if self.dtype == jnp.float64:
            operand = self.dtype
        return jax.lax.dot_general(
            a.astype(operand),
            b.astype(operand),
            dims,
            precision=self.precision,
            preferred_element_type=self.dtype,
        )


def _loop_over_tiles(
    starts: jax.Array, ends: jax.Array, rows: int, tile: int, out: jax.Array, visit
) -> Any:
    """``out = visit(out, group, first, owned)`` for every tile, in the order of the groups.

    ``first`` is the tile's first row, moved up so that the tile stays inside the array;
    ``owned`` [tile, 1] tells which of its rows belong to the tile.
    """
    tiles = -(-(ends - starts) // tile)
    until = jnp.cumsum(tiles)

    def body(state):
        i, out = state
        group = jnp.searchsorted(until, i, side="right", method="compare_all")
        start = starts[group] + (i - (until[group] - tiles[group])) * tile
        first = jnp.minimum(start, rows - tile)
        row = first + jnp.arange(tile, dtype=jnp.int32)
        owned = (row >= start) & (row < ends[group])
        return i + 1, visit(out, group, first, owned[:, None])

    axes = varying_axes(until)
    zero = vary(jnp.zeros((), until.dtype), axes)
    return jax.lax.while_loop(lambda state: state[0] < until[-1], body, (zero, out))[1]


def rows_matmul(
    lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array, *, plan: Plan
) -> jax.Array:
    """``lhs`` [m, k] and ``rhs`` [g, k, n] -> [m, n]."""
    length, tile = lhs.shape[0], at_most(1 if plan.alone else plan.tile, lhs.shape[0])
    lhs = jnp.pad(lhs, ((0, 1), (0, 0))) if plan.alone else _with_room(lhs, tile)
    m, n = lhs.shape[0], rhs.shape[1 if plan.transposed else 2]
    out = vary(jnp.zeros((m, n), plan.dtype), varying_axes(lhs))
    if 0 in (*lhs.shape, *rhs.shape):
        return out

    def visit(out, group, first, owned):
        rows = jax.lax.dynamic_slice_in_dim(lhs, first, tile)
        product = plan.dot(rows, rhs[group], (1, 1 if plan.transposed else 0))
        old = jax.lax.dynamic_slice_in_dim(out, first, tile)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(owned, product, old), first, 0)

    return _loop_over_tiles(starts, ends, m, tile, out, visit)[:length]


def _with_room(x: jax.Array, tile: int) -> jax.Array:
    """``x`` with ``tile`` rows more where their number is symbolic and may be less than a tile."""
    return jnp.pad(x, ((0, tile), (0, 0))) if is_symbolic(x.shape[0]) else x


def groups_matmul(
    lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array, *, plan: Plan
) -> jax.Array:
    """``lhs`` [m, k] and ``rhs`` [m, n] -> [g, k, n], or [g, n, k] when ``plan.transposed``."""
    if plan.transposed:
        lhs, rhs = rhs, lhs
    shape = (starts.shape[0], lhs.shape[1], rhs.shape[1])
    out = vary(jnp.zeros(shape, plan.dtype), varying_axes(lhs))
    if 0 in (*shape, lhs.shape[0]):
        return out
    tile = at_most(plan.tile, lhs.shape[0])
    lhs, rhs = _with_room(lhs, tile), _with_room(rhs, tile)

    def visit(out, group, first, owned):
        a = jax.lax.dynamic_slice_in_dim(lhs, first, tile)
        b = jax.lax.dynamic_slice_in_dim(rhs, first, tile)
        # rows of other groups may hold anything, not only finite values
        product = plan.dot(jnp.where(owned, a, 0), jnp.where(owned, b, 0), (0, 0))
        return out.at[group].add(product)

    return _loop_over_tiles(starts, ends, lhs.shape[0], tile, out, visit)
