"""Tiles of mean pooling: arithmetic, with a reason next to each line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.common.sequences import piece_count
from ejkernel.kernels.triton.kernel import override_tiles
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.problems.mean_pooling import PoolingProblem

FIELDS = {"rows": "token_tile", "channels": "channel_tile", "num_warps": "num_warps"}


class Sizes(NamedTuple):
    """Sizes of one call, as in ``PoolingProblem``."""

    rows: int
    channels: int
    chunk: int
    sequences: int


def sizes_of(p: PoolingProblem) -> Sizes:
    """Returns the sizes that every kernel takes."""
    return Sizes(p.rows, p.channels, p.chunk, p.sequences)


def exceeds_cache(p: PoolingProblem) -> bool:
    """Returns whether x is larger than a second-level cache, which has 32 MB or more."""
    return p.batch * p.rows * p.channels * p.itemsize > 2**25


@dataclass(frozen=True)
class Tiles:
    """The tile of one program.

    Attributes:
        rows: loaded at once by a program.
        channels: of a program.
        split: rows of a group that a program accumulates, 0 = all; a second launch adds the splits.
    """

    rows: int
    channels: int
    num_warps: int
    split: int = 0
    num_stages: ClassVar[int] = 1  # loops are short

    @property
    def fields(self) -> dict[str, int]:
        """Values by the names of the config's fields."""
        return {theirs: getattr(self, mine) for mine, theirs in FIELDS.items()}

    def apply_config(self, cfg: Any, problem: PoolingProblem, target: Target) -> Tiles:
        """Returns these tiles with the values that a config sets."""
        t = override_tiles(self, cfg, FIELDS)
        return replace(t, split=max(t.split, t.rows) if t.split else 0)

    def shape(self, p: PoolingProblem) -> tuple[int, int]:
        """Returns the groups that a program loads at once, and the rows of each."""
        rows = min(self.rows, power_of_two(p.chunk))
        return (1 if self.split else self.rows // rows), rows

    def programs(self, p: PoolingProblem) -> tuple[int, int]:
        """Returns the programs of a call for each block of channels, and the splits of a group."""
        if self.split and p.sequences:
            return piece_count(p.rows, p.sequences, self.split), 1
        if self.split:
            splits = -(-p.chunk // self.split)
            return p.groups * splits, splits
        return max(p.sequences, 1) * -(-p.per_sequence // self.shape(p)[0]), 1


def choose(p: PoolingProblem, target: Target) -> Tiles:
    """Returns the heuristic tiles; the gradient has the same rows, and full warps of channels."""
    # 16 KB in flight a program, 16 B a thread: with 32 three programs fit a multiprocessor instead
    # of four, with 8 they start and end too often
    rows = 64 if p.chunk <= 64 else 32
    channels = min(2**14 // rows // p.itemsize, max(16, power_of_two(p.channels)))
    if p.channels * p.itemsize % 16:
        rows = 16  # no vectors: an address for every element
    t = Tiles(rows, channels, 4)
    across = -(-p.channels // channels)
    programs = p.batch * max(p.sequences, 1) * -(-p.per_sequence // t.shape(p)[0]) * across
    full_sequences = p.sequences > 0 and p.per_sequence == 1
    if p.chunk <= 256 or not (full_sequences or (not p.sequences and programs < 8 * target.cores)):
        return t
    # few groups, or sequences of unknown length: the rows make eight programs a multiprocessor
    split = p.batch * p.rows * across // (8 * target.cores)
    return replace(t, split=max(128, min(4096, power_of_two(split))))


def neighbours(p: PoolingProblem, target: Target, t: Tiles) -> list[Tiles]:
    """Returns other tiles worth timing."""
    candidates = [replace(t, rows=r) for r in (16, 32, 64, 128)]
    candidates += [replace(t, num_warps=w) for w in (2, 8)]
    return [f for f in candidates if f.split % f.rows == 0 and f != t]
