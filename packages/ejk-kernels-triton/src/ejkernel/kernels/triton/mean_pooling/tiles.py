"""Tiles of mean pooling: arithmetic, with a reason next to each line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from ejkernel.kernels.triton.common.pieces import piece_count
from ejkernel.kernels.triton.kernel import overridden
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.targets import Target

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
FIELDS = {"rows": "token_tile", "channels": "channel_tile", "num_warps": "num_warps"}


class Sizes(NamedTuple):
    """Sizes of one call, as ``Problem`` has them."""

    rows: int
    channels: int
    chunk: int
    sequences: int


@dataclass(frozen=True)
class Problem:
    """Static properties of ``batch`` calls.

    Attributes:
        rows, channels: of x ``[batch, rows, channels]``.
        chunk: rows of a group, at most ``rows``.
        sequences: packed in every call; 0 = the rows are one sequence.
        masked: whether rows may be left out.
        dtype: of x and the means.
    """

    batch: int
    rows: int
    channels: int
    chunk: int
    sequences: int
    masked: bool
    dtype: str

    @property
    def per_sequence(self) -> int:
        """Groups of a sequence."""
        return -(-self.rows // self.chunk)

    @property
    def exceeds_cache(self) -> bool:
        """True where x is larger than a second-level cache, which has 32 MB or more."""
        return self.batch * self.rows * self.channels * BYTES[self.dtype] > 2**25

    @property
    def groups(self) -> int:
        """Groups of one call."""
        return max(self.sequences, 1) * self.per_sequence

    def folded(self, size: int) -> Problem:
        """Returns the problem of ``size`` times as many calls."""
        return replace(self, batch=size * self.batch)

    @property
    def sizes(self) -> Sizes:
        """The sizes that every kernel takes."""
        return Sizes(self.rows, self.channels, self.chunk, self.sequences)


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

    def apply_config(self, cfg: Any, problem: Problem, target: Target) -> Tiles:
        """Returns these tiles with the values that a config sets."""
        t = overridden(self, cfg, FIELDS)
        return replace(t, split=max(t.split, t.rows) if t.split else 0)

    def shape(self, p: Problem) -> tuple[int, int]:
        """Returns the groups that a program loads at once, and the rows of each."""
        rows = min(self.rows, power_of_two(p.chunk))
        return (1 if self.split else self.rows // rows), rows

    def programs(self, p: Problem) -> tuple[int, int]:
        """Returns the programs of a call for each block of channels, and the splits of a group."""
        if self.split and p.sequences:
            return piece_count(p.rows, p.sequences, self.split), 1
        if self.split:
            splits = -(-p.chunk // self.split)
            return p.groups * splits, splits
        return max(p.sequences, 1) * -(-p.per_sequence // self.shape(p)[0]), 1


def choose(p: Problem, target: Target) -> Tiles:
    """Returns the heuristic tiles; the gradient has the same rows, and full warps of channels."""
    # 16 KB in flight a program, 16 B a thread: with 32 three programs fit a multiprocessor instead
    # of four, with 8 they start and end too often
    rows = 64 if p.chunk <= 64 else 32
    channels = min(2**14 // rows // BYTES[p.dtype], max(16, power_of_two(p.channels)))
    if p.channels * BYTES[p.dtype] % 16:
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


def neighbours(p: Problem, target: Target, t: Tiles) -> list[Tiles]:
    """Returns other tiles worth timing."""
    found = [replace(t, rows=r) for r in (16, 32, 64, 128)]
    found += [replace(t, num_warps=w) for w in (2, 8)]
    return [f for f in found if f.split % f.rows == 0 and f != t]


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    x, cu = a["x"], a["cu_seqlens"]
    batch, rows = (1, x.shape[0]) if cu is not None else x.shape[:2]
    return Problem(
        batch=batch,
        rows=rows,
        channels=math.prod(x.shape[1 if cu is not None else 2 :]),
        chunk=a["chunk_size"] or max(rows, 1),
        sequences=0 if cu is None else cu.shape[0] - 1,
        masked=a["attention_mask"] is not None,
        dtype=jnp.dtype(x.dtype).name,
    )
