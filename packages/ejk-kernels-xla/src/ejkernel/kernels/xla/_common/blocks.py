"""Loops over blocks and tiles whose block index may be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.second_order import reverse_once


class BlockMask(Protocol):
    """Interface of a mask to the blockwise core; ``ejkernel.types.PreparedMask`` is one.

    ``tile`` gives the visible pairs of a tile, bool ``[#b, #h, block_q, block_kv]``, None when all
    are; pairs past the ends of the arrays are not visible. The ranges are half-open and count
    steps. A mask may also have ``kv_index(qi, step)`` and ``q_index(ki, step)``, which turn a step
    into a block number, for visits that are not consecutive; without them step and number agree.
    With ``q_order`` or ``kv_order`` ``[blocks]`` the outer loop takes its blocks in that order,
    which changes no result: mapped calls waste nothing when long ranges run together. With
    ``visited(qi, ki)``, bool ``[]``, ``tile`` need not hide the tiles outside the ranges. With
    ``seen_keys()``, bool ``[#b, #k]`` or None, the other keys and values may hold anything.
    """

    def tile(self, qi: Any, ki: Any) -> jax.Array | None: ...

    def kv_range(self, qi: Any) -> tuple[Any, Any]: ...

    def q_range(self, ki: Any) -> tuple[Any, Any]: ...


@jax.custom_batching.custom_vmap
def _union(start: jax.Array, stop: jax.Array) -> tuple[jax.Array, jax.Array]:
    return start, stop


@_union.def_vmap
def _union_of_batch(axis_size, in_batched, start, stop):
    """One range for all mapped calls: the trip count stays a scalar under vmap.

    A visit to a block outside the range of one of the calls changes nothing there, because its
    tile is hidden; without this a mapped trip count would turn every read into a gather.
    """
    del axis_size
    low = start.min(0) if in_batched[0] else start
    high = stop.max(0) if in_batched[1] else stop
    return _union(low, high), (False, False)


@jax.custom_batching.custom_vmap
def _seen(visited: jax.Array) -> jax.Array:
    return jnp.ones_like(visited)


@_seen.def_vmap
def _seen_of_batch(axis_size, in_batched, visited):
    del axis_size
    return visited, in_batched[0]


def hide_unvisited(x: jax.Array, visited: jax.Array) -> jax.Array:
    """Logits ``x`` of a tile, hidden if ``visited`` ``[]`` is False, which only mapped calls see.

    Alone, a call visits nothing but its own tiles, and then this costs nothing: the choice is
    between a constant's sides. Only the flag has a rule for vmap: with one for ``x``, JAX would
    apply it to derivatives mapped over directions for ever.
    """
    return jnp.where(_seen(visited), x, -jnp.inf)


def is_static(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) or (isinstance(x, np.ndarray) and x.ndim == 0)


def visit(
    bounds: tuple[Any, Any], body: Callable[[Any, Any], Any], carry: Any, operation: str
) -> Any:
    """``carry = body(step, carry)`` for every step in ``bounds``; no loop for a single step.

    ``operation`` is named where reverse mode meets a loop whose bounds are traced.
    """
    start, stop = bounds
    if is_static(start) and is_static(stop):
        if int(stop) <= int(start):
            return carry
        if int(stop) == int(start) + 1:
            return body(int(start), carry)
        return jax.lax.fori_loop(int(start), int(stop), body, carry)
    low, high = (jnp.asarray(x, jnp.int32) for x in (start, stop))
    return reverse_once(jax.lax.fori_loop(*_union(low, high), body, carry), operation)


def scan_blocks(
    body: Callable[[Any, Any, Any], Any], carry: Any, xs: Any, count: int, order: Any = None
) -> Any:
    """``carry, y = body(number, carry, x)`` over the leading axis; no loop for a single block.

    ``order`` ``[count]``: the block indices in the order of the loop; default: ascending. The ``y``
    are stacked by block index either way.
    """
    if count == 1:
        carry, y = body(0, carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda x: x[None], y)

    def visit_block(carry: Any, item: Any) -> Any:
        return body(item[0], carry, item[1])

    if order is None:
        return jax.lax.scan(visit_block, carry, (jnp.arange(count, dtype=jnp.int32), xs))

    def ordered(carry: Any, number: Any) -> Any:
        return body(number, carry, jax.tree.map(lambda x: take_block(x, number), xs))

    carry, y = jax.lax.scan(ordered, carry, order)
    back = jnp.argsort(order)
    return carry, jax.tree.map(lambda x: x[back], y)


def block_number(mask: Any, name: str, outer: Any, step: Any) -> Any:
    """The block visited in ``step``: ``mask.kv_index`` or ``mask.q_index`` if it has them."""
    index = getattr(mask, name, None)
    return step if index is None else index(outer, step)


def take_block(x: jax.Array, number: Any) -> jax.Array:
    """``x[number]`` on the leading axis."""
    if is_static(number):
        return x[int(number)]
    return jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False)


def add_block(x: jax.Array, number: Any, update: jax.Array) -> jax.Array:
    """``x`` with ``update`` added to ``x[number]``."""
    if x.shape[0] == 1:
        return x + update[None]
    new = take_block(x, number) + update
    return jax.lax.dynamic_update_index_in_dim(x, new, number, 0)


def tile_start(qi: Any, ki: Any, block_q: int, block_kv: int) -> tuple[Any, Any, Any, Any]:
    zero = jnp.int32(0)
    return zero, zero, jnp.asarray(qi * block_q, jnp.int32), jnp.asarray(ki * block_kv, jnp.int32)


def take_tile(x: jax.Array, qi: Any, ki: Any, block_q: int, block_kv: int) -> jax.Array:
    """Tile (qi, ki) of ``x`` ``[#b, #h, #q, k]``, padded to whole tiles; one row serves all."""
    qi, rows = (0, 1) if x.shape[2] == 1 else (qi, block_q)
    if x.shape[2:] == (rows, block_kv):
        return x
    start = tile_start(qi, ki, rows, block_kv)
    return jax.lax.dynamic_slice(x, start, (*x.shape[:2], rows, block_kv))


def add_tile(x: jax.Array, qi: Any, ki: Any, update: jax.Array) -> jax.Array:
    """``x`` with ``update`` added to tile (qi, ki), which may be one row for all."""
    qi = 0 if x.shape[2] == 1 else qi
    block_q, block_kv = update.shape[2:]
    new = take_tile(x, qi, ki, block_q, block_kv) + update
    if x.shape == new.shape:
        return new
    return jax.lax.dynamic_update_slice(x, new, tile_start(qi, ki, block_q, block_kv))
