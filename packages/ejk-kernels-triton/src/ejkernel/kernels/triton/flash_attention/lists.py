"""Sparse walks: a pattern of blocks and the mask as lists of tiles, made on the device.

The blocks of a pattern are part of its meaning, tiles are not. A tile inside one block is as the
block is; one that covers several is visited if any of them is, and then the pattern is an element
mask unless all are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.flash_attention.plans import Block, last_first
from ejkernel.kernels.triton.flash_attention.tiles import Tiles
from ejkernel.kernels.triton.launch import Batched, In, Launch, Out, power_of_two, struct
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.arrays import namespace
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.classify import classify_blocks
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.pattern import Blocks, by_element, in_tiles, inside_blocks
from ejkernel.types.masks.structure import Band

CHUNK = 1024  # states a program looks at together
PROGRAMS = 4096  # programs that are ordered together
BITS = 31  # of a word, without its sign


@dataclass(frozen=True)
class ListsPlan(Batched):
    """state int8 ``[rows, heads, q blocks, kv blocks]`` -> lists, and counts int32.

    Lists are ``[rows, heads, blocks, others + 3]``, of key blocks for each query block;
    ``by_key``: of query blocks for each key block; int16 where that does. Counts are
    ``[rows, heads, blocks]``.
    """

    rows: int
    heads: int
    lengths: tuple[int, int]
    tile: tuple[int, int]
    band: Band
    by_key: bool

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        blocks, others = self._blocks()
        lead = (self.rows, self.heads, blocks)
        number = "int16" if others < 2**15 else "int32"
        return struct(number, *lead, others + 3), struct("int32", *lead)

    def _blocks(self) -> tuple[int, int]:
        q, k = (-(-n // t) for n, t in zip(self.lengths, self.tile, strict=True))
        return (k, q) if self.by_key else (q, k)

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.flash_attention.lists_kernel import block_lists

        blocks, others = self._blocks()
        (length, other), (block, walked) = self.lengths, self.tile
        steps, lo, hi = (others, 1), self.band.lo, self.band.hi
        if self.by_key:
            length, other, block, walked = other, length, walked, block
            steps = (1, blocks)
            lo, hi = (None if x is None else -x for x in (hi, lo))
        arguments = {
            "state": In(0),
            "listed": Out(0),
            "counts": Out(1),
            "blocks": blocks,
            "others": others,
            "length": length,
            "other_length": other,
            "block_stride": steps[0],
            "other_stride": steps[1],
            "lo": lo,
            "hi": hi,
            "BLOCK": block,
            "OTHER": walked,
            "CHUNK": min(CHUNK, power_of_two(others)),
        }
        return Launch.of(block_lists, arguments, (self.rows * self.heads * blocks,), 1, 1)

    def folded(self, size: int) -> ListsPlan:
        return replace(self, rows=size * self.rows)


@dataclass(frozen=True)
class OrderPlan(Batched):
    """counts ``[rows, list_heads, blocks]`` -> order int32 ``[rows, programs]``.

    There is a program for each block of ``heads`` heads; ``group``: lists of a program, where
    lists differ between query heads and programs are of key heads.
    """

    rows: int
    list_heads: int
    heads: int
    blocks: int
    group: int
    last_first: bool

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (struct("int32", self.rows, self.heads * self.blocks),)

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.flash_attention.lists_kernel import long_rows_first

        group = 1 if self.list_heads == 1 else self.group
        arguments = {
            "counts": In(0),
            "order": Out(0),
            "blocks": self.blocks,
            "heads": self.heads,
            "list_rows": self.list_heads * self.blocks,
            "head_step": 0 if self.list_heads == 1 else group * self.blocks,
            "LAST_FIRST": self.last_first,
            "GROUP": group,
            "CHUNK": min(PROGRAMS, power_of_two(self.heads * self.blocks)),
        }
        return Launch.of(long_rows_first, arguments, (self.rows,), 8, 1)

    def folded(self, size: int) -> OrderPlan:
        return replace(self, rows=size * self.rows)


def walk_operands(
    problem: Problem, mask: MaskInfo, pattern: jax.Array | None, tile: Tiles, *, by_key: bool
) -> dict[str, jax.Array]:
    """The operands of a walk over the tiles that anybody sees. ``by_key``: over query blocks."""
    p, rules = problem, problem.rules
    sizes = (p.q_len, p.kv_len, tile.block_q, tile.block_kv)
    some = every = jnp.ones((), bool)
    if pattern is not None:
        some, every = in_tiles(jnp.asarray(pattern), _blocks(p), *sizes)
    if rules.arrays:
        seen, whole = map(jnp.asarray, classify_blocks(mask.terms, *sizes))
        some, every = some & seen, every & whole
    state = some.astype(jnp.int8) + (some & every).astype(jnp.int8)
    plan = ListsPlan(*state.shape[:2], sizes[:2], sizes[2:], rules.band, by_key)
    listed, counts = call(plan, state)
    heads, group = (p.kv_heads, p.group) if by_key else (p.heads, 1)
    queue = OrderPlan(*counts.shape[:2], heads, counts.shape[2], group, last_first(rules, by_key))
    (order,) = call(queue, counts)
    return {"listed": listed, "order": order}


def mask_beside_walk(
    problem: Problem, pattern: jax.Array | None, dense: jax.Array | None, tile: Tiles
) -> tuple[dict[str, jax.Array], Block]:
    """What tiles of a walk need beside their list, as ``element_mask``, or as words of bits."""
    sizes = (problem.q_len, problem.kv_len, tile.block_q, tile.block_kv)
    if pattern is None or inside_blocks(_blocks(problem), *sizes):
        return element_mask(problem, None, dense)
    rows, keys = _blocks(problem)
    first = np.arange(0, problem.kv_len, tile.block_kv)
    last = np.minimum(first + tile.block_kv, problem.kv_len) - 1
    met = last // keys - first // keys  # blocks of a tile, less one
    if dense is not None or met.max() >= BITS:
        return element_mask(problem, pattern, dense)
    xp = namespace(pattern)
    words: Any = 0
    for n in range(met.max() + 1):
        seen = xp.take(pattern, np.minimum(first // keys + n, last // keys), axis=3)
        words = words | xp.where(seen & (met >= n), np.int32(1 << n), np.int32(0))
    return {"mask": words}, (rows, keys, tile.block_kv)


def element_mask(
    problem: Problem, pattern: jax.Array | None, dense: jax.Array | None
) -> tuple[dict[str, jax.Array], Block]:
    """The mask operand, int8, if there is one, and the rows and keys that an element covers."""
    if pattern is None:
        return ({} if dense is None else {"mask": dense}), (1, 1, 0)
    blocks = _blocks(problem)
    if dense is None:
        return {"mask": pattern.astype(jnp.int8)}, (*blocks, 0)
    pairs = by_element(pattern, blocks, problem.q_len, problem.kv_len)
    return {"mask": dense * pairs.astype(jnp.int8)}, (1, 1, 0)


def _blocks(problem: Problem) -> Blocks:
    assert problem.pattern_blocks is not None
    return problem.pattern_blocks
