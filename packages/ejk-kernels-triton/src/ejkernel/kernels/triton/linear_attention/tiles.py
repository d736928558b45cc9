"""How linear attention is launched: arithmetic with a reason beside each line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.linear_attention.problem import BYTES, Problem
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.attention import field


@dataclass(frozen=True)
class Tiles:
    """The launches of a call.

    Attributes:
        chunk: rows treated as one product.
        segment: rows that a program walks, a multiple of ``chunk``.
        columns: of values, of a program.
    """

    chunk: int
    segment: int
    columns: int
    num_warps: int
    num_stages: int


def width(dim: int) -> int:
    """Columns that hold a head dim; products need 16."""
    return max(16, power_of_two(dim))


def choose(p: Problem, target: Target) -> Tiles:
    """The heuristic launches."""
    # 64 rows fill one asynchronous product of four warps; what a chunk costs within itself grows
    # with it, what the state costs does not
    chunk = min(64, max(16, power_of_two(p.rows // p.states)))
    # state, scores and output of a program stay in registers: with 64 columns of 128 channels a few
    # of them would be spilled
    columns = 32 if p.operand == "bfloat16" and max(width(p.dim), width(p.value_dim)) < 256 else 16
    whole = all(width(n) == n for n in (p.dim, p.value_dim))
    if not (target.hopper and target.tensor_maps and whole):
        # operands of the smaller products, or addresses, lie in registers
        chunk, columns = min(chunk, 32 if max(width(p.dim), width(p.value_dim)) < 256 else 16), 16
    if p.value_parts > 1:
        chunk = min(chunk, 32)  # gates in parts take registers in every halving of a walk
    t = Tiles(chunk, chunk, columns, 4, 2)
    if chunk * max(width(p.dim), width(p.value_dim)) * BYTES[p.operand] > 2**15:
        # two stages of q and k exceed the shared memory, registers of four warps the rest
        t = replace(t, num_warps=8, num_stages=1)
    return replace(t, segment=segment_of(p, t, target))


CHANNELS = 32  # that decay, of a program: twice as many spill


def channel_options(p: Problem, parts: int, target: Target) -> dict[str, int]:
    """Four programs a multiprocessor hide what one waits for; what they spill is in halvings, which
    few chunks need."""
    return {"maxnreg": 128} if target.hopper and p.operand == "bfloat16" and parts == 1 else {}


def segment_of(p: Problem, t: Tiles, target: Target) -> int:
    """Long segments pass fewer states through memory; eight programs a multiprocessor remain."""
    programs = p.batch * p.heads * -(-p.rows // t.chunk) * -(-p.value_dim // t.columns)
    steps = max(1, min(32, programs // (8 * target.cores)))
    steps = 1 << (steps.bit_length() - 1)
    mean = power_of_two(-(-(p.rows // p.states) // t.chunk))
    return t.chunk * min(steps, max(1, mean))


def honour(t: Tiles, cfg: Any, p: Problem, target: Target) -> Tiles:
    """``t`` with what the config says instead."""
    names = {"chunk": "time_tile", "columns": "dv_tile"}
    names |= {"num_warps": "num_warps", "num_stages": "num_stages"}
    given = {n: field(cfg, name) for n, name in names.items()}
    t = replace(t, **{n: int(x) for n, x in given.items() if x is not None})
    return replace(t, segment=segment_of(p, t, target))


def fields(t: Tiles) -> dict[str, int]:
    """As fields of the config."""
    return {
        "time_tile": t.chunk,
        "dv_tile": t.columns,
        "num_warps": t.num_warps,
        "num_stages": t.num_stages,
    }


def near(p: Problem, t: Tiles, target: Target) -> list[Tiles]:
    """Launches worth timing."""
    found = [replace(t, chunk=c) for c in (32, 64, 128)]
    found += [replace(t, columns=n) for n in (32, 64, 128) if n <= width(p.value_dim)]
    found += [replace(t, num_stages=n) for n in (1, 3)] + [replace(t, num_warps=8)]
    found = [replace(f, segment=segment_of(p, f, target)) for f in found]
    return [f for f in dict.fromkeys(found) if f != t]
