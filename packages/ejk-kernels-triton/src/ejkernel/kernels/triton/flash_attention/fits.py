"""Tiles worth compiling: least shared memory, least registers, enough programs.

Lower bounds only: what they rule out cannot run or must spill, the rest is for the compiler and
the clock. Compiled for sm_90 at head dim 128 the forward kernel takes 115712 B of shared memory
and the bound says 114688; the query gradient 99328 and 98304; the key gradients 99328 and 98304.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ejkernel.kernels.triton.common.dims import split_dim
from ejkernel.kernels.triton.flash_attention import single_row
from ejkernel.kernels.triton.flash_attention.tiles import FlashTiles, Tiles, pass_neighbours
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.attention.problem import Problem

REGISTERS = 255  # per thread, a limit of the instruction set


@dataclass(frozen=True)
class Needs:
    """Lower bounds of a launch: shared bytes a program, registers a thread, and its programs."""

    shared: int
    registers: int
    programs: int


def needs(kernel: str, tiles: Tiles, problem: Problem, target: Target) -> Needs:
    """Returns the lower bounds of ``kernel``: "forward", "dq" or "dkv"."""
    dim, value_dim = sum(split_dim(problem.dim)), sum(split_dim(problem.value_dim))
    both = dim + value_dim
    resident, streamed, length, heads = tiles.block_q, tiles.block_kv, problem.q_len, problem.heads
    if kernel == "dkv":
        resident, streamed, length, heads = streamed, resident, problem.kv_len, problem.kv_heads
    # the stages in flight; Hopper's MMAs read the resident operands from shared memory too
    steps = 0 if target.platform == "rocm" else tiles.num_stages - 1
    if target.hopper and tiles.num_stages > 1:
        steps = tiles.num_stages
    shared = steps * streamed * both
    if target.hopper and problem.itemsize == 2:
        shared += resident * (dim if kernel == "forward" else both)
    accumulators = resident * {"forward": value_dim, "dq": dim}.get(kernel, max(dim, value_dim))
    threads = tiles.num_warps * target.warp_size
    # float32 accumulators and one tile of logits; dk and dv may be separate launches
    registers = (accumulators + tiles.block_q * tiles.block_kv) // threads
    programs = -(-length // resident) * heads * problem.batch
    return Needs(shared * problem.itemsize, registers, programs)


def fits(kernel: str, tiles: Tiles, chosen: Tiles, problem: Problem, target: Target) -> bool:
    """Returns whether ``tiles`` may be faster than ``chosen``, the heuristic's."""
    need, usual = (needs(kernel, t, problem, target) for t in (tiles, chosen))
    # less than a wave leaves multiprocessors idle
    idle = need.programs < min(target.cores, usual.programs)
    return need.shared <= target.shared_limit and need.registers <= REGISTERS and not idle


def neighbours(problem: Problem, target: Target, chosen: FlashTiles) -> list[FlashTiles]:
    """Returns tiles worth timing: one step away from ``chosen`` in one pass, if they fit."""
    candidates = []
    if chosen.decode is not None:
        others = single_row.neighbours(problem, target, chosen.decode)
        candidates += [replace(chosen, decode=tiles) for tiles in others]
    for part, kernel in (("fwd", "forward"), ("dkv", "dkv"), ("dq", "dq")):
        if part == "fwd" and chosen.decode is not None:
            continue
        ours = getattr(chosen, part)
        for tile in pass_neighbours(ours, problem):
            # a config has one number of warps and of stages for both backward kernels
            separate = part == "dq" and not _same_launch(tile, chosen.dkv)
            if not separate and fits(kernel, tile, ours, problem, target):
                candidates.append(replace(chosen, **{part: tile}))
    return candidates


def _same_launch(a: Tiles, b: Tiles) -> bool:
    return (a.num_warps, a.num_stages) == (b.num_warps, b.num_stages)
