"""How a step of latent decoding is launched: arithmetic with a reason at each line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ejkernel.kernels.triton.bound_launch import RUNS
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.serving.decode_tiles import DecodeTiles, query_rows
from ejkernel.kernels.triton.serving.params import column_parts, is_wide
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.serving.problem import LatentProblem

FORMS = {"int8": "digits", "float8_e4m3fn": "quads"}  # of scores, see eight_bit_scores


def held_bytes(problem: LatentProblem, tiles: DecodeTiles, target: Target) -> int:
    """Shared memory of a program: the steps in flight, queries, probabilities, reductions."""
    rows, _ = query_rows(problem, tiles.most)
    width = 4 if is_wide(problem) else 2
    # an asynchronous matmul still reads its step while the next one arrives
    behind = 0 if target.hopper and rows >= 64 else 1
    steps = max(1, tiles.num_stages - behind)
    held = tiles.block * problem.token_bytes * steps
    if tiles.once:
        # converted values do not arrive later than the values they are made of
        held = tiles.block * problem.dim * (max(1, tiles.num_stages - 1) + width)
    queries = rows * (problem.dim + tiles.block) * width
    return held + queries + 2048


def can_map(problem: LatentProblem, tiles: DecodeTiles, target: Target) -> bool:
    """True where steps can be read by TMA: inside one page, both parts of a row one power of two.

    Rows behind the last are cut off by the descriptor, those before a window are not.
    """
    p = problem
    (main, rest), _ = column_parts(p)
    return (
        target.hopper
        and target.tensor_maps
        and p.window_left is None
        and not is_wide(p)
        and p.page_size % tiles.block == 0
        and rest > 0
        and main + rest == p.dim
        and p.pages * p.page_size < RUNS
    )


def canonical(tiles: DecodeTiles, problem: LatentProblem, target: Target) -> DecodeTiles:
    """``tiles`` as they run, whatever a config made of them."""
    maps = tiles.maps and can_map(problem, tiles, target)
    # rows of one matrix instruction leave the multiprocessor to conversions, if there are any
    few = maps and tiles.most == 16 and not is_wide(problem)
    return replace(tiles, maps=maps, form=FORMS.get(problem.key_dtype, "") if few else "")


def choose(problem: LatentProblem, target: Target) -> DecodeTiles:
    """The heuristic launch."""
    return canonical(replace(_chosen(problem, target), maps=True), problem, target)


def _chosen(problem: LatentProblem, target: Target) -> DecodeTiles:
    t = _form(problem, target)
    # no step longer than the longest sequence
    t = replace(t, block=max(16, min(t.block, power_of_two(problem.capacity))))
    if target.platform == "rocm":
        return t  # no asynchronous copies: nothing to keep in flight
    # two programs of four warps: one's loads fly while the other computes
    programs = max(1, 8 // t.num_warps)
    for stages in (4, 3, 2):
        deep = replace(t, num_stages=stages)
        if programs * held_bytes(problem, deep, target) <= target.shared_limit:
            return replace(deep, per_core=programs)
    while t.block > 16 and held_bytes(problem, t, target) > target.shared_limit:
        t = replace(t, block=t.block // 2)
    return t


def _form(problem: LatentProblem, target: Target) -> DecodeTiles:
    """Rows, warps and tokens of a step."""
    p = problem
    eight_bit = p.is_eight_bit and not is_wide(p)
    if is_wide(p):
        return DecodeTiles(16, 4, 2, 1, most=16)
    if p.group * p.tokens <= 16 or target.platform == "rocm":
        if target.platform == "rocm":
            # 8-bit values are converted by several instructions, in more registers
            return DecodeTiles(16 if eight_bit else 32, 4, 1, 1, most=16)
        # four warps wait for each other in every step: long ones, as registers allow
        return DecodeTiles(64 if eight_bit and target.hopper else 32, 4, 2, 1, 2, most=16)
    if not target.hopper or (eight_bit and p.group * p.tokens <= 32):
        # so do 32, shared by eight warps
        return DecodeTiles(32, 8, 2, 1, most=32)
    # asynchronous matmuls have 64 rows: 512 accumulators are half the registers of eight warps;
    # a step gathered from several pages takes a pointer a token
    block = 64 if p.page_size % 64 == 0 else 32
    return DecodeTiles(block, 8, 2, 1, most=64, apart=True, once=eight_bit)


def neighbours(
    problem: LatentProblem, target: Target, chosen: DecodeTiles
) -> Iterable[DecodeTiles]:
    """Tiles worth timing: steps of half to double the tokens, two to four stages, that fit."""
    size = max(problem.page_size, 1)
    for block in (chosen.block // 2, chosen.block, chosen.block * 2):
        for warps in (4, 8):
            for stages in (2, 3, 4):
                tiles = replace(
                    chosen, block=block, num_warps=warps, num_stages=stages, pages=block // size
                )
                fits = held_bytes(problem, tiles, target) <= target.shared_limit
                if block >= max(16, size) and fits:
                    yield canonical(tiles, problem, target)
