"""Lists of the blocks that sparse attention visits.

For each block of one axis, the blocks of the other axis that it sees: first the blocks that need no
element mask, then the others, each in rising order.

Work split: one program per (row of patterns, block); it reads its row of states twice. Bound: the
bytes of the states and of the lists, a few for each pair of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from ejkernel.kernels.triton.common.visibility import band_blocks
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, Launch, power_of_two, struct
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.masks.structure import Band

MAX_STATES = 1024  # states that a program looks at together
MAX_PROGRAMS = 4096  # programs that are ordered together


@triton.jit
def block_lists(
    state,
    listed,
    counts,
    blocks,
    others,
    length,
    other_length,
    block_stride,
    other_stride,
    lo,
    hi,
    BLOCK: tl.constexpr,
    OTHER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes block lists by ``state`` (without the band): 0 no row sees it, 1 some may, 2 all do.

    Rows of ``listed`` ``[rows, others + 3]`` hold the number of blocks that need no element mask,
    the number of blocks, then the blocks; the tail of a row is not written. ``counts`` ``[rows]``
    is a contiguous copy of the block counts.
    """
    row = tl.program_id(0)
    block = row % blocks
    states = state + (row // blocks).to(tl.int64) * blocks * others + block * block_stride
    list_row = listed + row.to(tl.int64) * (others + 3)
    first = block * BLOCK
    last = tl.minimum(first + BLOCK, length) - 1
    start, full_start, full_stop, stop = band_blocks(first, last, other_length, lo, hi, OTHER)
    count = 0
    for phase in tl.static_range(0, 2):
        for n0 in range(0, others, CHUNK):
            n = n0 + tl.arange(0, CHUNK)
            block_state = tl.load(states + n * other_stride, mask=n < others, other=0)
            full = (block_state == 2) & (n >= full_start) & (n < full_stop)
            if phase == 0:
                chosen = full
            else:
                chosen = (block_state > 0) & (n >= start) & (n < stop) & ~full
            slot = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(list_row + 2 + slot, n, mask=chosen)
            count += tl.sum(chosen.to(tl.int32), 0)
        tl.store(list_row + phase, count)
    tl.store(counts + row, count)


@dataclass(frozen=True)
class ListsLaunch(Launch):
    """Launch of ``block_lists`` on state int8 ``[rows, heads, q blocks, kv blocks]``.

    The results are lists ``[rows, heads, blocks, others + 3]`` of key blocks for each query block,
    or with ``by_key`` of query blocks for each key block, int16 where indices fit, and
    counts int32 ``[rows, heads, blocks]``.
    """

    kernel = block_lists
    batching: ClassVar = {"state": BATCHED}

    rows: int
    heads: int
    lengths: tuple[int, int]
    tile: tuple[int, int]
    band: Band
    by_key: bool

    def outputs(self) -> Mapping[str, jax.ShapeDtypeStruct | None]:
        blocks, others = self._blocks()
        lead = (self.rows, self.heads, blocks)
        dtype = "int16" if others < 2**15 else "int32"
        return {"listed": struct(dtype, *lead, others + 3), "counts": struct("int32", *lead)}

    def _blocks(self) -> tuple[int, int]:
        q, k = (-(-n // t) for n, t in zip(self.lengths, self.tile, strict=True))
        return (k, q) if self.by_key else (q, k)

    def grid(self, target: Target) -> tuple[int, ...]:
        return (self.rows * self.heads * self._blocks()[0],)

    def options(self, target: Target) -> Mapping[str, Any]:
        return {"num_warps": 1, "num_stages": 1}

    def arguments(self, target: Target) -> Mapping[str, Any]:
        blocks, others = self._blocks()
        (length, other_length), (block, other) = self.lengths, self.tile
        steps, lo, hi = (others, 1), self.band.lo, self.band.hi
        if self.by_key:
            length, other_length, block, other = other_length, length, other, block
            steps = (1, blocks)
            lo, hi = (None if x is None else -x for x in (hi, lo))
        return {
            "blocks": blocks,
            "others": others,
            "length": length,
            "other_length": other_length,
            "block_stride": steps[0],
            "other_stride": steps[1],
            "lo": lo,
            "hi": hi,
            "BLOCK": block,
            "OTHER": other,
            "CHUNK": min(MAX_STATES, power_of_two(others)),
        }

    def with_batch(self, size: int) -> ListsLaunch:
        return replace(self, rows=size * self.rows)


@triton.jit
def long_rows_first(
    counts,
    order,
    blocks,
    heads,
    list_rows,
    head_step,
    LAST_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Orders the programs of a batch row: programs with over twice the mean number of visits first.

    A program's index is head * blocks + block. The other programs are ordered by head, for the L2
    cache, each head with its blocks in rising order, or falling with LAST_FIRST.
    """
    row = tl.program_id(0)
    counts += row.to(tl.int64) * list_rows
    programs = heads * blocks
    total = 0
    for p0 in range(0, programs, CHUNK):
        number, steps, inside = _program_steps(
            counts, p0, programs, blocks, head_step, LAST_FIRST, GROUP, CHUNK
        )
        total += tl.sum(steps, 0)
    limit = 2 * (total // programs) + 1
    placed = 0
    for phase in tl.static_range(0, 2):
        for p0 in range(0, programs, CHUNK):
            number, steps, inside = _program_steps(
                counts, p0, programs, blocks, head_step, LAST_FIRST, GROUP, CHUNK
            )
            chosen = inside & ((steps > limit) == (phase == 0))
            slot = placed + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(order + row.to(tl.int64) * programs + slot, number, mask=chosen)
            placed += tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _program_steps(
    counts,
    p0,
    programs,
    blocks,
    head_step,
    LAST_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Returns indices of CHUNK programs, their visits (of all lists of a group), and a mask."""
    p = p0 + tl.arange(0, CHUNK)
    inside = p < programs
    head = p // blocks
    block = p % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    steps = tl.zeros([CHUNK], tl.int32)
    for member in tl.static_range(0, GROUP):
        at = head * head_step + member * blocks + block
        steps += tl.load(counts + at, mask=inside, other=0)
    return head * blocks + block, steps, inside


@dataclass(frozen=True)
class OrderLaunch(Launch):
    """Launch of ``long_rows_first`` on counts ``[rows, list_heads, blocks]``.

    The result is order int32 ``[rows, programs]``, with a program for each block of ``heads``
    heads. ``group``: lists of a program, where lists differ between query heads and programs are of
    key heads.
    """

    kernel = long_rows_first
    batching: ClassVar = {"counts": BATCHED}

    rows: int
    list_heads: int
    heads: int
    blocks: int
    group: int
    last_first: bool

    def outputs(self) -> Mapping[str, jax.ShapeDtypeStruct | None]:
        return {"order": struct("int32", self.rows, self.heads * self.blocks)}

    def grid(self, target: Target) -> tuple[int, ...]:
        return (self.rows,)

    def options(self, target: Target) -> Mapping[str, Any]:
        return {"num_warps": 8, "num_stages": 1}

    def arguments(self, target: Target) -> Mapping[str, Any]:
        group = 1 if self.list_heads == 1 else self.group
        return {
            "blocks": self.blocks,
            "heads": self.heads,
            "list_rows": self.list_heads * self.blocks,
            "head_step": 0 if self.list_heads == 1 else group * self.blocks,
            "LAST_FIRST": self.last_first,
            "GROUP": group,
            "CHUNK": min(MAX_PROGRAMS, power_of_two(self.heads * self.blocks)),
        }

    def with_batch(self, size: int) -> OrderLaunch:
        return replace(self, rows=size * self.rows)
