"""Tiles of linear attention: arithmetic, with a reason next to each line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ejkernel.kernels.triton.bound_launch import MAP_ROWS
from ejkernel.kernels.triton.kernel import override_tiles
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.linear_attention.problem import BYTES, Problem
from ejkernel.kernels.triton.targets import Target


@dataclass(frozen=True)
class Tiles:
    """The tiles of the launches of a call.

    Attributes:
        chunk: rows of one matmul.
        segment: rows that a program loops over, a multiple of ``chunk``.
        columns: columns of the values that a program has.
    """

    chunk: int
    segment: int
    columns: int
    num_warps: int
    num_stages: int

    @property
    def fields(self) -> dict[str, int]:
        """Values by the names of the config's fields."""
        return {theirs: getattr(self, mine) for mine, theirs in FIELDS.items()}

    def apply_config(self, cfg: Any, problem: Problem, target: Target) -> Tiles:
        """Returns these tiles with the values that a config sets."""
        changed = override_tiles(self, cfg, FIELDS)
        if changed == self:
            return self
        return replace(changed, segment=segment_of(problem, changed, target))


FIELDS = {
    "chunk": "time_tile",
    "columns": "dv_tile",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}


def width(dim: int) -> int:
    """Returns the columns that hold a head dim; matmuls need 16."""
    return max(16, power_of_two(dim))


STEPS = 16  # tokens, at most


def few_tokens(p: Problem) -> bool:
    """Returns whether tokens are processed one after the other (``decode``).

    Packed sequences may have all of them in one, which then takes its time.
    """
    return p.rows <= (2 * p.sequences if p.sequences else STEPS)


def choose(p: Problem, target: Target) -> Tiles:
    """Returns the heuristic tiles."""
    wide = max(width(p.dim), width(p.value_dim))
    if few_tokens(p):
        # a single token is all memory: many bytes in flight; several tokens wait for each other's
        # reductions, which two warps finish first
        warps = 4 if p.rows <= p.states else 2
        columns = max(16, min(width(p.value_dim), 2048 * warps // width(p.dim)))
        return Tiles(16, 16, columns, warps, 2)
    # 64 rows fill one asynchronous matmul of four warps; the cost inside a chunk grows with its
    # length, the cost of the state does not
    chunk = min(64, max(16, power_of_two(p.rows // p.states)))
    parts = max(p.key_parts, p.value_parts)
    # state, scores and output of a program stay in registers: of 128 channels 64 columns of four
    # warps; decays per channel take more registers, wider operands more shared memory
    narrow = p.compute_dtype == "bfloat16"
    columns, warps = 16, 4
    if not parts and (narrow or wide <= 128):
        columns, warps = 64, (4 if narrow and wide <= 128 else 8)
    elif narrow and wide <= 128:
        columns = 32
    full_width = all(width(n) == n for n in (p.dim, p.value_dim))
    if not (target.hopper and target.tensor_maps and full_width):
        # operands of the smaller matmuls, or addresses, lie in registers
        chunk, columns, warps = min(chunk, 32 if wide <= 128 else 16), 16, 4
    t = Tiles(chunk, chunk, columns, warps, 2)
    if chunk * wide * BYTES[p.compute_dtype] > 2**15:
        # two stages of q and k exceed the shared memory, registers of four warps the rest
        t = replace(t, num_warps=8, num_stages=1)
    return replace(t, segment=segment_of(p, t, target))


# how kernels read rows: by address, or through TMA in full chunks or in runs
POINTERS, FULL, RUN = range(3)


def maps_of(p: Problem, chunk: int, sizes: tuple[tuple[int, int], ...], target: Target) -> int:
    """Returns how kernels read rows; ``sizes``: columns of every array, and of its tiles."""
    aligned = all(n % block == 0 and n * BYTES[p.narrowest] % 16 == 0 for n, block in sizes)
    if not (target.hopper and target.tensor_maps and aligned and p.batch * p.rows < MAP_ROWS):
        return POINTERS
    return RUN if p.sequences or p.rows % chunk else FULL


# partial results of ``backward_kv``: of ``leaving``, one per column of warps, and of
# ``z_reading``, one per row of warps
ACROSS, DOWN = 2, 4

CHANNELS = 32  # decaying channels of a program: twice as many spill


def cut_matrices(chunk: int, reverse: bool) -> np.ndarray:
    """Returns four matrices ``[row, gate]`` of 0 and 1.

    They have 1 for the gates between a row and the middle of the chunk, the state before the chunk,
    the state after it; the fourth is the second one transposed.
    """
    row, gate = np.arange(chunk)[:, None], np.arange(chunk)[None, :]
    until = gate < row if reverse else gate <= row
    late = row >= chunk // 2
    middle = np.where(late, until, ~until) & (late == late.T)
    since, remaining = (~until, until) if reverse else (until, ~until)
    return np.stack([middle, since, remaining, since.T])


def channel_options(p: Problem, parts: int, target: Target) -> dict[str, int]:
    """Returns compiler options of kernels over decaying channels.

    Three programs a multiprocessor hide the waits of one, and near chunks spill little. With four,
    or with the two that fit without a bound, the gradient took 1.3 times as long.
    """
    narrow = p.compute_dtype == "bfloat16"
    return {"maxnreg": 168} if target.hopper and narrow and parts == 1 else {}


def states_options(p: Problem, t: Tiles, target: Target) -> dict[str, int]:
    """Returns compiler options of ``chunk_loop`` without a query.

    It waits for rows, and little else: four programs a multiprocessor have more of them in flight,
    which is worth 16 B of spills (0.043 ms for 0.059). Constants need no bound.
    """
    narrow = p.compute_dtype == "bfloat16" and t.num_warps == 4
    return {"maxnreg": 128} if target.hopper and narrow and p.scalar and not p.steady else {}


def segment_of(p: Problem, t: Tiles, target: Target) -> int:
    """Returns the rows of a segment.

    Long segments pass fewer states through memory and read fewer of them; one wave of programs, as
    many as registers hold, remains.
    """
    programs = p.batch * p.heads * -(-p.rows // t.chunk) * -(-p.value_dim // t.columns)
    resident = max(1, 8 // t.num_warps)
    steps = max(1, min(32, programs // (resident * target.cores)))
    steps = 1 << (steps.bit_length() - 1)
    mean = power_of_two(-(-(p.rows // p.states) // t.chunk))
    return t.chunk * min(steps, max(1, mean))


def split_tiles(t: Tiles, *, reads: bool, stores_states: bool, wide: bool) -> Tiles:
    """Returns the tiles of ``chunk_loop`` with split matmuls; tiles of a config stay as they are.

    ``reads``: there is a query; ``stores_states``: before every chunk; ``wide``: a state is
    128 x 128.
    """
    if (t.num_warps, t.num_stages) not in ((4, 2), (8, 2)):
        return t
    if not reads:
        # the next rows are in flight: 161 KiB. The state alone would take half the registers of
        # four warps
        return replace(t, num_warps=8 if wide else t.num_warps, num_stages=3)
    # Two stages of three arrays leave no room for a second program, and yet the next key and value
    # wait for the last matmul that reads them. Two programs of one stage wait alternately, and four
    # warps compute scores of 64 rows once where eight compute them twice.
    return t if stores_states or t.num_warps == 4 else replace(t, num_warps=4, num_stages=1)


def holds_full_state(p: Problem, t: Tiles, target: Target) -> bool:
    """Returns whether one program holds a full state, so that dk and dv come from one loop.

    It holds the state in registers, and in shared memory next to four arrays of rows.
    """
    sizes = [width(n) for n in (p.dim, p.value_dim)]
    maps = maps_of(p, t.chunk, ((p.dim, sizes[0]), (p.value_dim, sizes[1])), target)
    small = max(sizes) <= 128 and sizes[0] * sizes[1] * BYTES[p.compute_dtype] <= 32768
    return bool(maps) and small and t.chunk <= 64 and not (p.key_parts or p.value_parts)


def neighbours(p: Problem, target: Target, t: Tiles) -> list[Tiles]:
    """Returns other tiles worth timing."""
    candidates = [replace(t, chunk=c) for c in (32, 64, 128)]
    candidates += [replace(t, columns=n) for n in (32, 64, 128) if n <= width(p.value_dim)]
    candidates += [replace(t, num_stages=n) for n in (1, 3)] + [replace(t, num_warps=8)]
    candidates = [replace(f, segment=segment_of(p, f, target)) for f in candidates]
    return [f for f in dict.fromkeys(candidates) if f != t]
