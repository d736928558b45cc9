"""Tiles of the gated delta rule: the heuristic, and candidates worth timing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.gated_delta_rule.problem import Problem
from ejkernel.kernels.triton.kernel import override_tiles
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.linear_attention.tiles import maps_of, width
from ejkernel.kernels.triton.targets import Target

FIELDS = {
    "chunk": "time_tile",
    "columns": "dv_tile",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
MAX_CHUNK = 64
FEW_TOKENS = 16  # at most, per sequence


@dataclass(frozen=True)
class Tiles:
    """Tiles of the scans over chunks; the other launches follow from the chunk.

    Attributes:
        chunk: tokens of a chunk.
        columns: columns of the state of a program.
    """

    chunk: int
    columns: int
    num_warps: int
    num_stages: int

    @property
    def fields(self) -> dict[str, int]:
        """Values of the config's fields."""
        return {theirs: getattr(self, mine) for mine, theirs in FIELDS.items()}

    def apply_config(self, cfg: Any, problem: Problem, target: Target) -> Tiles:
        """Returns these tiles with the values of a config, in which chunks are bounded."""
        t = override_tiles(self, cfg, FIELDS)
        return replace(t, chunk=max(16, min(t.chunk, MAX_CHUNK)))


def few_tokens(p: Problem) -> bool:
    """Returns whether tokens are processed one after the other.

    Packed sequences may have all of them in one, which then takes its time.
    """
    return p.rows <= (2 * p.sequences if p.sequences else FEW_TOKENS)


def has_sm90_kernel(p: Problem, t: Tiles, target: Target) -> bool:
    """Returns whether the kernels in Gluon run, whose scans have 64 columns."""
    bfloat16 = {p.dtype, p.out, p.narrowest} == {"bfloat16"}
    fits = (t.chunk, t.columns, t.num_warps) == (MAX_CHUNK, 64, 4) and p.dim in (64, 128)
    maps = fits and maps_of(p, t.chunk, ((p.dim, p.dim), (p.value_dim, 64)), target)
    return bool(bfloat16 and maps and compat.has_gluon())


def choose(p: Problem, target: Target) -> Tiles:
    """Returns the heuristic tiles."""
    wide = width(p.value_dim)
    if few_tokens(p):
        # the state of one token is all memory: many bytes in flight per thread
        columns = max(16, min(wide, 8192 // width(p.dim)))
        return Tiles(16, columns, max(2, columns * width(p.dim) // 2048), 1)
    # 64 rows fill one asynchronous matmul of four warps. Operands of synchronous ones lie in
    # registers, where the three parts of float32 operands leave room for smaller tiles only
    narrow = p.compute_dtype == "bfloat16"
    chunk, columns, stages = 32, min(wide, 32), 2
    if narrow and target.hopper:
        chunk, columns, stages = MAX_CHUNK, min(wide, 64), 3
    elif p.dtype == "float32" and target.platform == "cuda":
        chunk, columns = 16, 16
    chunk = min(chunk, max(16, power_of_two(p.rows // p.states)))
    t = Tiles(chunk, columns, 4, stages)
    return t if has_sm90_kernel(p, t, target) else spread(p, t, target)


def spread(p: Problem, t: Tiles, target: Target) -> Tiles:
    """Returns tiles of fewer columns where programs are few.

    A scan waits for its own matmuls: more programs of fewer columns, as long as every
    multiprocessor has but one.
    """
    columns, wide = t.columns, width(p.value_dim)
    scans = p.batch * p.states * p.heads
    while columns > 16 and 2 * scans * -(-wide // columns) <= target.cores:
        columns //= 2
    return replace(t, columns=columns)


def neighbours(p: Problem, target: Target, t: Tiles) -> list[Tiles]:
    """Returns tiles worth timing."""
    candidates = [replace(t, columns=n) for n in (16, 32, 64, 128) if n <= width(p.value_dim)]
    candidates += [replace(t, num_warps=n) for n in (2, 4, 8)]
    if not few_tokens(p):
        candidates += [replace(t, chunk=n) for n in (16, 32, 64)]
        candidates += [replace(t, num_stages=n) for n in (1, 2, 3)]
    return [f for f in dict.fromkeys(candidates) if f != t]
