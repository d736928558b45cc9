"""A step of the selected branch: some blocks of the list of a tile.

Scores are ``[keys, rows]``: what belongs to a row lies along the lanes of one register, so that the
mask of a block costs a comparison with a row, and maxima and sums are of registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.matmul import matmul
from ejkernel.kernels.pallas.tpu.flash_attention.steps import overlap_scores
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import (
    TILE_BYTES,
    Problem,
    Tiles,
)

# a row that has seen nothing keeps FLOOR, and exp2(HIDDEN - FLOOR) is 0
FLOOR, HIDDEN = -1e38, -3e38
PARTS = 2  # of a step: the matmuls of one overlap the exponentials of the other


@dataclass(frozen=True)
class Part:
    """Consecutive entries of a list: their blocks, and the index of the first entry."""

    blocks: tuple[Any, ...]
    first: Any

    def load(self, p: Problem, ref: Any) -> jax.Array:
        """Returns the rows of these blocks ``[keys, d]``."""
        rows = [ref[block_rows(p, block)] for block in self.blocks]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)


def block_rows(p: Problem, block: Any) -> Any:
    """Returns the rows of a block in vector memory."""
    rows = p.rows_of_block
    return pl.ds(pl.multiple_of(block * rows, rows), rows)


def raw_scores(p: Problem, k: jax.Array, q: jax.Array) -> jax.Array:
    """Returns k q^T in units of ``Problem.unit``."""
    x = matmul(k, q, (1, 1))
    return x if p.scale > 0.0 else -x if p.scale < 0.0 else jnp.zeros_like(x)


def visible(p: Problem, t: Tiles, part: Part, rows_ref: Any) -> jax.Array:
    """Returns the mask ``[keys, rows]`` of a part of the list.

    Blocks are in rising order, so that no token is ahead of the row's own in the listed keys.
    """
    own_row = rows_ref[0, 0, 0, pl.ds(0, 1)]
    entries_per_word = t.chunk * t.words
    word = rows_ref[0, 0, 0, pl.ds(1 + part.first // entries_per_word, 1)]
    key = lax.broadcasted_iota(jnp.int32, (p.rows_of_block, own_row.shape[1]), 0)
    masks = []
    for n in range(len(part.blocks)):
        entry = part.first + n
        selected = (word >> lax.rem(entry, entries_per_word)) & 1
        # the last visible row of the block: of its tokens, and not ahead of the own one
        last = jnp.minimum(own_row - entry * p.rows_of_block, p.size - 1)
        masks.append(key <= jnp.where(selected == 1, last, -1))
    return masks[0] if len(masks) == 1 else jnp.concatenate(masks, axis=0)


def for_steps(
    t: Tiles,
    list_ref: Any,
    scores: Callable[[Part], Any],
    add: Callable[[Part, Any], None],
) -> None:
    """Runs ``add(part, scores(part))`` on the parts of every step of a list.

    ``list_ref``: the number of entries, then the entries, in scalar memory.
    """
    part_size = max(1, t.chunk // PARTS)

    def run_step(step: Any, carry: None) -> None:
        parts = []
        for n in range(0, t.chunk, part_size):
            first = step * t.chunk + n
            entries = tuple(list_ref[0, 0, 0, 0, 1 + first + i] for i in range(part_size))
            parts.append(Part(entries, first))
        overlap_scores(parts, scores, add)

    lax.fori_loop(0, pl.cdiv(list_ref[0, 0, 0, 0, 0], t.chunk), run_step, None)


def read_rows(ref: Any, rows: int, width: int) -> jax.Array:
    """Returns the rows of a tile, float32 ``[rows, width]``, of a block of ``Tiles.rows_spec``.

    8 rows of bfloat16 are half a register: they are put together in float32.
    """
    x = ref[0].astype(jnp.float32)
    if x.ndim == 2:  # heads next to each other
        heads = range(0, x.shape[1], width)
        x = jnp.concatenate([x[:, start : start + width] for start in heads], axis=0)
    return x.reshape(rows, width)


def load_rows(ref: Any, scratch: Any) -> None:
    """Stores the rows of a tile in ``scratch`` ``[rows, d]``, of a block of ``Tiles.rows_spec``."""
    scratch[...] = read_rows(ref, *scratch.shape).astype(scratch.dtype)


def store_rows(ref: Any, rows: jax.Array) -> None:
    """Stores the rows of a tile, float32, in a block of ``Tiles.rows_spec``."""
    if len(ref.shape) == 3:  # heads next to each other
        tokens = ref.shape[1]
        heads = range(0, rows.shape[0], tokens)
        rows = jnp.concatenate([rows[start : start + tokens] for start in heads], axis=1)
    ref[0] = rows.reshape(ref.shape[1:]).astype(ref.dtype)


@dataclass(frozen=True)
class Specs:
    """Block specs of the grid (batch, key head, tile).

    Attributes:
        problem, tiles: of the call.
        rows: rows of a tile.
        entries: entries of its list.
        words: integers of a row of ``tile_lists``: the own row, then the bits of the entries.
    """

    problem: Problem
    tiles: Tiles
    rows: int
    entries: int
    words: int

    def of_rows(self, width: int) -> pl.BlockSpec:
        """Returns the spec of an array as ``tile_rows`` makes it."""
        return self.tiles.rows_spec(self.problem, width)

    def of_values(self, count: int = 1) -> pl.BlockSpec:
        """Returns the spec of ``[b, hk, tiles, count, rows]``."""
        return pl.BlockSpec((1, 1, 1, count, self.rows), lambda b, m, i: (b, m, i, 0, 0))

    def of_lists(self) -> pl.BlockSpec:
        """Returns the spec of ``[b, hk, tiles, 1, 1 + entries]``."""
        block = (1, 1, 1, 1, 1 + self.entries)
        return pl.BlockSpec(block, lambda b, m, i: (b, m, i, 0, 0), memory_space=pltpu.SMEM)


def specs_of(p: Problem, t: Tiles, lists: jax.Array, rows: jax.Array) -> Specs:
    """Returns the block specs for tables of ``tile_lists``."""
    return Specs(p, t, rows.shape[4], lists.shape[4] - 1, rows.shape[3])


def compiler_params(chip: Chip, resident: int) -> Any:
    """Returns the parameters of a kernel whose tiles of a head follow one another.

    ``resident``: bytes of keys and values, with their gradients in the backward pass.
    """
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=chip.vmem_limit(resident + TILE_BYTES),
    )


def cost(p: Problem, t: Tiles, columns: int, moved: int) -> pl.CostEstimate:
    """Returns the cost of a kernel with matmuls of ``columns``, as if tokens shared no block."""
    pairs = p.batch * p.kv_heads * t.tile_count(p) * t.tokens * p.group
    pairs *= min(t.tokens * p.slots, p.blocks) * p.rows_of_block
    return pl.CostEstimate(flops=2 * pairs * columns, transcendentals=pairs, bytes_accessed=moved)


def bytes_of(*arrays: Any) -> int:
    """Returns the bytes of arrays or of their types."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
