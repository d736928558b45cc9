"""Static properties and tiles of the selected branch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.tpu.common.chip import LANES, SUBLANES, Chip
from ejkernel.kernels.pallas.tpu.flash_attention.layout import padded_dim
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.params import config_field
from ejkernel.types.attention.problem import LOG2E
from ejkernel.types.problems.selected_blocks import SelectedProblem

ROWS = 128  # a matrix unit has a column for each row of a tile, and vectors have 128 lanes
CHUNK = 512  # keys of a step: the matmuls of one half hide the exponentials of the other
TILE_BYTES = 12 * 2**20  # of vector memory, for what is of a tile; 8 suffice on v4
WORD = 32  # entries of a list that one integer has a bit for
UNIT = 16  # rows of a bfloat16 register: no block starts inside one
JOINS_HEADS = (
    f"joins_heads=True: head dims in multiples of {LANES}, and at most 16 query heads a kv head"
)


@dataclass(frozen=True)
class Problem(SelectedProblem):
    """Static properties of a call of the selected branch, with what the kernels derive of them."""

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of keys and of values in the call."""
        return self.dim, self.value_dim

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of keys and of values, as kernels read them."""
        return padded_dim(self.dim), padded_dim(self.value_dim)

    @property
    def rows_of_block(self) -> int:
        """Rows of a block as kernels read it: a power of two below a register's lanes, so that
        whole blocks fill a step, else full registers."""
        if self.size >= LANES:
            return math.ceil(self.size / LANES) * LANES
        return max(UNIT, 1 << (self.size - 1).bit_length())

    @property
    def unit(self) -> float:
        """The logit of a raw score of 1; positive, so that hidden keys stay hidden."""
        return abs(self.scale) or 2.0**-120

    @property
    def log2_unit(self) -> float:
        """The base-2 logit of a raw score of 1."""
        return self.unit * LOG2E


@dataclass(frozen=True)
class Tiles:
    """Tiles of the selected branch.

    Attributes:
        tokens: tokens of a tile, whose query heads of a group are its rows.
        chunk: blocks of a step; a power of two.
        span, span_backward: blocks whose keys and values are in vector memory at a time.
        joins_heads: kernels read and write rows as ``[b, s, h * d]``.
    """

    tokens: int
    chunk: int
    span: int
    span_backward: int
    joins_heads: bool = False

    def apply_config(self, cfg: Any, p: Any, target: Chip) -> Tiles:
        """Returns these tiles, overridden by a config."""
        if not config_field(cfg, "joins_heads"):
            return self
        if not self.by_head or any(d % LANES for d in Problem.from_call(p).widths):
            raise ConfigError(JOINS_HEADS)
        return replace(self, joins_heads=True)

    @property
    def by_head(self) -> bool:
        """Returns whether kernels read ``[b, h, s, d]`` or ``[b, s, h * d]``, as flash attention.

        The rows of a tile are (head, token) then; else an array is made for them whose rows are
        (token, head).
        """
        return self.tokens % SUBLANES == 0

    def rows_shape(self, p: Problem, batch: int, width: int) -> tuple[int, ...]:
        """Returns the shape of rows of all tokens as the kernels read and write them."""
        length = self.tile_count(p) * self.tokens
        if self.joins_heads:
            return batch, length, p.heads * width
        if self.by_head:
            return batch, p.heads, length, width
        return batch, p.kv_heads, length * p.group, width

    def rows_spec(self, p: Problem, width: int) -> pl.BlockSpec:
        """Returns the block of the rows of a tile in such an array."""
        if self.joins_heads:
            return pl.BlockSpec((1, self.tokens, p.group * width), lambda b, m, i: (b, i, m))
        rows = (p.group, self.tokens) if self.by_head else (1, p.group * self.tokens)
        return pl.BlockSpec((1, *rows, width), lambda b, m, i: (b, m, i, 0))

    @property
    def words(self) -> int:
        """Steps whose entries have their bits in one integer."""
        return WORD // self.chunk

    def entries(self, p: Problem, span: int) -> int:
        """Returns the entries of the list of a tile over ``span`` blocks."""
        most = min(self.tokens * p.slots, span)
        return math.ceil(most / self.chunk) * self.chunk

    def tile_count(self, p: Problem) -> int:
        """Returns the number of tiles of a key head."""
        return math.ceil(p.length / self.tokens)

    def resident_bytes(self, p: Problem, *, backward: bool) -> int:
        """Returns the bytes of the keys and values in vector memory, with their gradients."""
        span = self.span_backward if backward else self.span
        return span * _block_bytes(p, backward)


def choose(p: Problem, chip: Chip) -> Tiles:
    """Returns the tiles of a call."""
    # a tile multiplies every key that one of its tokens sees with all its rows: more tokens share
    # more keys, until the rows fill the columns of a matrix unit
    tokens = 1 << max(0, (ROWS // p.group).bit_length() - 1)
    while tokens * p.group % UNIT:
        tokens *= 2
    chunk = 1 << max(0, (CHUNK // p.rows_of_block).bit_length() - 1)
    return Tiles(tokens, chunk, _span(p, chip, False), _span(p, chip, True))


def _block_bytes(p: Problem, backward: bool) -> int:
    """Returns the bytes of vector memory of a block."""
    columns = sum(math.ceil(d / LANES) * LANES for d in p.dims)
    # a gradient is a float32 for each element of a key and value
    return p.rows_of_block * columns * (p.itemsize + (4 if backward else 0))


def _span(p: Problem, chip: Chip, backward: bool) -> int:
    """Returns how many blocks are in vector memory at a time, in equal spans."""
    most = max(1, max(chip.vmem // 2, chip.vmem - TILE_BYTES) // _block_bytes(p, backward))
    blocks = max(1, p.blocks)
    return math.ceil(blocks / math.ceil(blocks / most))
