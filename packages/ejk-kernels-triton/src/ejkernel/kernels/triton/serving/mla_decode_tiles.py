"""Tiles of latent decoding: arithmetic, with a reason next to each line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ejkernel.kernels.triton.bound_launch import MAP_ROWS
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.serving.decode_tiles import DecodeTiles, query_rows
from ejkernel.kernels.triton.serving.params import column_parts, needs_float32
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.serving.problem import LatentProblem

FORMS = {"int8": "int8_split", "float8_e4m3fn": "column_pairs"}  # of scores, see eight_bit_scores


def shared_bytes(problem: LatentProblem, tiles: DecodeTiles, target: Target) -> int:
    """Returns the shared memory of a program: steps, queries, probabilities, reductions."""
    rows, _ = query_rows(problem, tiles.max_rows)
    width = 4 if needs_float32(problem) else 2
    # an asynchronous matmul still reads its step while the next one arrives
    behind = 0 if target.hopper and rows >= 64 else 1
    steps = max(1, tiles.num_stages - behind)
    step_bytes = tiles.block * problem.token_bytes * steps
    if tiles.convert_once:
        # converted values do not arrive later than the values they are made of
        step_bytes = tiles.block * problem.dim * (max(1, tiles.num_stages - 1) + width)
    queries = rows * (problem.dim + tiles.block) * width
    return step_bytes + queries + 2048


def can_use_tma(problem: LatentProblem, tiles: DecodeTiles, target: Target) -> bool:
    """Returns whether steps can be read by TMA: in one page, both parts of a row powers of two.

    Rows behind the last are cut off by the descriptor, those before a window are not.
    """
    p = problem
    (main, tail), _ = column_parts(p)
    return (
        target.hopper
        and target.tensor_maps
        and p.window_left is None
        and not needs_float32(p)
        and p.page_size % tiles.block == 0
        and tail > 0
        and main + tail == p.dim
        and p.pages * p.page_size < MAP_ROWS
    )


def canonical(tiles: DecodeTiles, problem: LatentProblem, target: Target) -> DecodeTiles:
    """Returns tiles without the options that a call or a config does not allow."""
    tma = tiles.tma and can_use_tma(problem, tiles, target)
    # rows of one matrix instruction leave the multiprocessor to conversions, if there are any
    converts = tma and tiles.max_rows == 16 and not needs_float32(problem)
    return replace(tiles, tma=tma, form=FORMS.get(problem.key_dtype, "") if converts else "")


def choose(problem: LatentProblem, target: Target) -> DecodeTiles:
    """Returns the heuristic tiles."""
    return canonical(replace(_chosen(problem, target), tma=True), problem, target)


def _chosen(problem: LatentProblem, target: Target) -> DecodeTiles:
    t = _small(problem, target) or _form(problem, target)
    # no step longer than the longest sequence
    t = replace(t, block=max(16, min(t.block, power_of_two(problem.capacity))))
    if target.platform == "rocm":
        return t  # no asynchronous copies: nothing to keep in flight
    # two programs of four warps: one's loads fly while the other computes
    programs = max(1, 8 // t.num_warps)
    for stages in (4, 3, 2):
        deep = replace(t, num_stages=stages)
        if programs * shared_bytes(problem, deep, target) <= target.shared_limit:
            return replace(deep, programs_per_core=programs)
    while t.block > 16 and shared_bytes(problem, t, target) > target.shared_limit:
        t = replace(t, block=t.block // 2)
    return t


def _small(problem: LatentProblem, target: Target) -> DecodeTiles | None:
    """Returns the form of a call so small that every program has one step; None for others.

    Then queries, a step and its results take the time: a quarter of the rows takes half of it (one
    H200, 128 heads, one sequence of 1,024 tokens: 5.3 us of 64 rows' 8.9). A second launch would be
    a fifth of a single sequence's call (13.0 us in place of 16.1).
    """
    p = problem
    if not target.hopper or p.is_eight_bit or needs_float32(p) or p.page_size % 64:
        return None
    t = DecodeTiles(64, 4, 2, 1, 2, max_rows=16, num_launches=1)
    steps = p.batch * -(-p.capacity // t.block) * query_rows(p, t.max_rows)[1]
    return t if steps <= 2 * target.cores else None  # two programs share a multiprocessor


def _form(problem: LatentProblem, target: Target) -> DecodeTiles:
    """Returns rows, warps and tokens of a step; stages follow."""
    p = problem
    eight_bit = p.is_eight_bit and not needs_float32(p)
    if needs_float32(p):
        return DecodeTiles(16, 4, 2, 1, max_rows=16)
    if p.group * p.tokens <= 16 or target.platform == "rocm":
        if target.platform == "rocm":
            # 8-bit values are converted by several instructions, in more registers
            return DecodeTiles(16 if eight_bit else 32, 4, 1, 1, max_rows=16)
        # four warps wait for each other in every step: long ones, as registers allow
        return DecodeTiles(64 if eight_bit and target.hopper else 32, 4, 2, 1, 2, max_rows=16)
    if not target.hopper or (eight_bit and p.group * p.tokens <= 32):
        # so do 32, shared by eight warps
        return DecodeTiles(32, 8, 2, 1, max_rows=32)
    # asynchronous matmuls have 64 rows: 512 accumulators are half the registers of eight warps;
    # a step gathered from several pages takes a pointer a token
    block = 64 if p.page_size % 64 == 0 else 32
    return DecodeTiles(block, 8, 2, 1, max_rows=64, opaque=True, convert_once=eight_bit)


def neighbours(
    problem: LatentProblem, target: Target, chosen: DecodeTiles
) -> Iterable[DecodeTiles]:
    """Yields tiles worth timing: steps of half to double the tokens, two to four stages."""
    size = max(problem.page_size, 1)
    for block in (chosen.block // 2, chosen.block, chosen.block * 2):
        for warps in (4, 8):
            for stages in (2, 3, 4):
                tiles = replace(
                    chosen, block=block, num_warps=warps, num_stages=stages, pages=block // size
                )
                fits = shared_bytes(problem, tiles, target) <= target.shared_limit
                if block >= max(16, size) and fits:
                    yield canonical(tiles, problem, target)
