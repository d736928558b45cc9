"""Sizes that every kernel of the selected branch takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ejkernel.kernels.triton.common.sequences import lane_count, piece_count
from ejkernel.kernels.triton.launch import Launch, power_of_two
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem, padded
from ejkernel.kernels.triton.native_sparse_attention.tiles import Tiles, piece_length


class Sizes(NamedTuple):
    """Sizes and constants of a call; None where a kernel does not need one.

    A launch is for ``head_count`` key heads, which end before ``head_end``. Fields in capitals are
    constants: columns of keys (D) and values (DV) and the powers of two that hold them; ROWS query
    heads of a GROUP, SPLITS such tiles; SLOTS entries of a list, as a power of two; MEMBERS query
    heads of each of TOKENS tokens; KEYS of PARTS tiles of a block, EVEN if they fill it; PHASES 2
    if the loop over a token's own block is separate; LENGTH entries of a piece.
    """

    length: int
    heads: int | None
    kv_heads: int
    head_count: int | None
    head_end: int | None
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
    PHASES: int
    LENGTH: int
    LANES: int
    PRECISION: str


@dataclass(frozen=True)
class SelectedLaunch(Launch):
    """Common to the kernels of the selected branch."""

    problem: Problem
    tiles: Tiles

    @property
    def members(self) -> int:
        """Query heads of a group that are rows of one matmul, as a power of two."""
        return min(power_of_two(self.problem.group), self.tiles.heads)

    @property
    def token_programs(self) -> int:
        """Programs of one key head, where each has one token."""
        return self.problem.length * -(-self.problem.group // self.tiles.heads)

    @property
    def phases(self) -> int:
        """Loops over a token's list: 2 where its own block, which needs a mask, is separate."""
        return 2

    @property
    def splits(self) -> int:
        """Tiles of query heads in a group."""
        return -(-self.problem.group // self.tiles.heads)

    @property
    def pieces(self) -> int:
        """Pieces of the lists of all blocks, empty ones included."""
        p = self.problem
        return piece_count(p.entries, p.blocks, piece_length(p))

    @property
    def score_sizes(self) -> dict[str, Any]:
        """The sizes of kernels that compute scores."""
        p = self.problem
        return {"heads": p.heads, "slots": p.slots, "slope": p.slope, "sign": p.sign}

    @property
    def block_sizes(self) -> dict[str, Any]:
        """The sizes of kernels over the lists of blocks."""
        p = self.problem
        return {"blocks": p.blocks, "entries": p.entries, "pieces": self.pieces}

    def sizes(self, **needed: Any) -> Sizes:
        """Returns the sizes of a call with those that only some kernels need."""
        p, t = self.problem, self.tiles
        optional = (
            "heads", "head_count", "head_end", "slots", "blocks", "entries", "pieces", "slope",
            "scale", "sign",
        )  # fmt: skip
        return Sizes(
            length=p.length,
            kv_heads=p.kv_heads,
            size=p.size,
            D=p.dim,
            DV=p.value_dim,
            COLUMNS=padded(p.dim),
            VALUE_COLUMNS=padded(p.value_dim),
            GROUP=p.group,
            ROWS=min(padded(p.group), t.heads),
            SPLITS=self.splits,
            SLOTS=power_of_two(p.slots),
            MEMBERS=self.members,
            TOKENS=max(t.tokens, 16 // self.members),
            KEYS=t.keys,
            PARTS=p.parts(t.keys),
            EVEN=p.size % t.keys == 0,
            PHASES=self.phases,
            LENGTH=piece_length(p),
            LANES=lane_count(p.blocks),
            PRECISION=p.precision,
            **dict.fromkeys(optional) | needed,
        )


@dataclass(frozen=True)
class SomeHeadsLaunch(SelectedLaunch):
    """A launch for ``head_count`` key heads, which end before ``head_end``."""

    head_count: int
    head_end: int

    @property
    def head_sizes(self) -> dict[str, int]:
        """The sizes that say which key heads these are."""
        return {"head_count": self.head_count, "head_end": self.head_end}
