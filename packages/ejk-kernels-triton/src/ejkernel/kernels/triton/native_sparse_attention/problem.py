"""Static properties of the kernels of the selected branch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.types.attention.problem import LOG2E

TINY = 2.0**-120


def padded(n: int) -> int:
    """The power of two that holds ``n`` rows or columns of a product."""
    return max(16, power_of_two(n))


@dataclass(frozen=True)
class Problem:
    """Sizes and options.

    Attributes:
        batch, length, heads, kv_heads, dim, value_dim: sizes of q, k and v.
        size: tokens of a block.
        blocks: of one row of tokens, all its sequences together.
        slots: entries of a token's list of blocks.
        scale: factor of the products.
        dtype: of q, k, v and the output.
        packed: whether a row may hold several sequences.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    size: int
    blocks: int
    slots: int
    scale: float
    dtype: str
    packed: bool

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def entries(self) -> int:
        """Of the lists of all tokens of one row and key head."""
        return self.length * self.slots

    @property
    def slope(self) -> float:
        """Products in base 2; never 0, so that keys hidden at -inf stay so."""
        return max(abs(self.scale) * LOG2E, TINY)

    @property
    def sign(self) -> float | None:
        """What products are multiplied with before the slope; None = nothing."""
        return None if self.scale > 0.0 else -1.0 if self.scale < 0.0 else 0.0

    @property
    def precision(self) -> str:
        """Of float32 products, in Triton's words."""
        return "tf32"

    @property
    def keeps_ds(self) -> bool:
        """Whether the gradient of products, which keys need, is kept for that of queries: half the
        reads and a third of the products. ``at_once`` bounds the memory, one key head at least."""
        return self.itemsize == 2 and self._kept <= min(8, 4 * self.kv_heads) * self.dim

    @property
    def at_once(self) -> int:
        """Key heads of a launch of the backward pass: what is kept of them takes no more memory
        than four arrays of queries."""
        if not self.keeps_ds:
            return self.kv_heads
        return min(self.kv_heads, self.kv_heads * 4 * self.dim // self._kept)

    @property
    def _kept(self) -> int:
        """Products of a token and query head that are kept."""
        return power_of_two(self.slots) * self.size

    def folded(self, size: int) -> Problem:
        """``size`` calls at once."""
        return replace(self, batch=size * self.batch)

    def parts(self, keys: int) -> int:
        """Tiles of ``keys`` keys that a block has."""
        return math.ceil(self.size / keys)


class Sizes(NamedTuple):
    """What the kernels of the selected branch know of a call; None where one does not need it.

    ``some``, ``last``: a launch is for that many key heads, which end before the last.
    Fields in capitals are constants of a compiled kernel: columns of keys (D) and values (DV) and
    the powers of two that hold them; ROWS query heads of a GROUP, SPLITS such parts; SLOTS entries
    of a list, as a power of two; MEMBERS query heads of each of TOKENS tokens; KEYS of PARTS tiles
    of a block, EVEN if they fill it; LENGTH entries of a piece.
    """

    length: int
    heads: int | None
    kv_heads: int
    some: int | None
    last: int | None
    slots: int | None
    blocks: int | None
    entries: int | None
    pieces: int | None
    size: int
    slope: float | None
    scale: float | None
    sign: float | None
    D: int
    DV: int
    COLUMNS: int
    VALUE_COLUMNS: int
    GROUP: int
    ROWS: int
    SPLITS: int
    SLOTS: int
    MEMBERS: int
    TOKENS: int
    KEYS: int
    PARTS: int
    EVEN: bool
    PHASES: int  # 2 = a token's own block is walked apart
    LENGTH: int
    LANES: int
    PRECISION: str
