"""How means are launched: arithmetic with a reason beside each line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.common.pieces import piece_count
from ejkernel.kernels.triton.kernel import overridden
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.targets import Target

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
FIELDS = {"rows": "token_tile", "channels": "channel_tile", "num_warps": "num_warps"}


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
    def streamed(self) -> bool:
        """Whether x leaves the second-level cache before anybody comes back for it; those of large
        GPUs have 32 MB and more."""
        return self.batch * self.rows * self.channels * BYTES[self.dtype] > 2**25

    @property
    def groups(self) -> int:
        """Of one call."""
        return max(self.sequences, 1) * self.per_sequence

    def folded(self, size: int) -> Problem:
        """``size`` times as many calls."""
        return replace(self, batch=size * self.batch)

    @property
    def kernel_params(self) -> dict[str, Any]:
        """Numbers and constants that kernels ask for by these names."""
        more = {"per_sequence": self.per_sequence, "groups": self.groups}
        return {**vars(self), **more, "STREAMED": self.streamed}


@dataclass(frozen=True)
class Tiles:
    """A launch.

    Attributes:
        rows: read at once by a program.
        channels: of a program.
        part: rows of a group that a program sums, 0 = all; then a second launch adds the parts.
    """

    rows: int
    channels: int
    num_warps: int
    part: int = 0

    @property
    def fields(self) -> dict[str, int]:
        """As fields of the config."""
        return {theirs: getattr(self, mine) for mine, theirs in FIELDS.items()}

    def apply_config(self, cfg: Any, problem: Problem, target: Target) -> Tiles:
        """These tiles with what the config says instead."""
        t = overridden(self, cfg, FIELDS)
        return replace(t, part=max(t.part, t.rows) if t.part else 0)

    def shape(self, p: Problem) -> tuple[int, int]:
        """(groups, rows of each) that a program reads at once."""
        each = min(self.rows, power_of_two(p.chunk))
        return (1 if self.part else self.rows // each), each

    def split(self, p: Problem) -> tuple[int, int]:
        """(programs of a call for each block of channels, parts of a group)."""
        if self.part and p.sequences:
            return piece_count(p.rows, p.sequences, self.part), 1
        if self.part:
            parts = -(-p.chunk // self.part)
            return p.groups * parts, parts
        return max(p.sequences, 1) * -(-p.per_sequence // self.shape(p)[0]), 1


def choose(p: Problem, target: Target) -> Tiles:
    """The heuristic launch of the means; the gradient has the same rows, and whole warps of
    channels."""
    # 16 KB in flight a program, 16 B a thread: with 32 three programs fit a multiprocessor in place
    # of four, with 8 they come and go too often
    rows = 64 if p.chunk <= 64 else 32
    channels = min(2**14 // rows // BYTES[p.dtype], max(16, power_of_two(p.channels)))
    if p.channels * BYTES[p.dtype] % 16:
        rows = 16  # no vectors: an address for every element
    t = Tiles(rows, channels, 4)
    across = -(-p.channels // channels)
    programs = p.batch * max(p.sequences, 1) * -(-p.per_sequence // t.shape(p)[0]) * across
    packed_whole = p.sequences > 0 and p.per_sequence == 1
    if p.chunk <= 256 or not (packed_whole or (not p.sequences and programs < 8 * target.cores)):
        return t
    # few groups, or sequences of unknown length: eight programs a multiprocessor of what there is
    part = p.batch * p.rows * across // (8 * target.cores)
    return replace(t, part=max(128, min(4096, power_of_two(part))))


def neighbours(p: Problem, target: Target, t: Tiles) -> list[Tiles]:
    """Launches worth timing."""
    found = [replace(t, rows=r) for r in (16, 32, 64, 128)]
    found += [replace(t, num_warps=w) for w in (2, 8)]
    return [f for f in found if f.part % f.rows == 0 and f != t]


def problem_of(a: Mapping[str, Any]) -> Problem:
    """The static properties of a call whose arguments are canonical."""
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
