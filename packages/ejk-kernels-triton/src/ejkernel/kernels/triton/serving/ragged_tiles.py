"""Tiles of a ragged call: arithmetic, with a reason next to each line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton.bound_launch import MAP_ROWS
from ejkernel.kernels.triton.kernel import override_tiles
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.serving import decode_tiles
from ejkernel.kernels.triton.serving.decode_tiles import LAUNCHED, query_rows
from ejkernel.kernels.triton.serving.params import column_parts, needs_float32
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.params import config_field
from ejkernel.types.serving.problem import PagedProblem, RaggedProblem
from ejkernel.types.serving.schedule import LongPrefill

MIN_SPLIT_KEYS = 1024  # keys of a split: its partial results are a quarter of their bytes
MAX_COMPARISONS = 4096  # of rows with sequences, which each program of few rows makes at once
MAX_REPEATED_READS = 4  # times that few rows of one sequence may read its keys, one a chunk
MAX_PLANNED_ROWS = 1024  # that a program looks at at once, where a plan has their sequences
MAX_DECODE_TOKENS = 8  # rows of a sequence in one decoding step: keys are read once for all of them


@dataclass(frozen=True)
class RaggedTiles:
    """Tiles of prefill, and of the decoding of other sequences.

    Attributes:
        rows: query rows of a tile, tokens times heads.
        block: keys read at a time.
        num_warps, num_stages: of the program that reads them.
        decode: tiles of decoded sequences.
        min_split_keys: least keys of a split of a tile.
        splits: splits of a decoded sequence on average; None: as many as fill the chip.
        group: query heads of a kv head, a property of the call.
        decode_tokens: most new tokens of a sequence that is decoded.
        long_prefill: the sequences that a long-prefill kernel attends to, None without one.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int
    decode: decode_tiles.DecodeTiles
    min_split_keys: int
    splits: int | None = None
    group: int = 1
    decode_tokens: int = 1
    long_prefill: LongPrefill | None = None

    def apply_config(self, cfg: Any, problem: RaggedProblem, target: Target) -> RaggedTiles:
        """Returns the tiles with the values of a config."""
        p, tiles = problem.paged, override_tiles(self, cfg, LAUNCHED | {"splits": "num_splits"})
        queries = config_field(cfg, "num_queries_per_block")
        pages = config_field(cfg, "num_kv_pages_per_block")
        if queries is not None:
            max_rows = min(256, power_of_two(problem.rows * p.group))
            rows = min(max_rows, power_of_two(int(queries) * self.members))
            tiles = replace(tiles, rows=max(16, rows))
        if pages is not None:
            block = decode_tiles.block_of_pages(int(pages), p, target)
            tiles = replace(tiles, block=block, decode=replace(tiles.decode, block=block))
        return tiles

    @property
    def members(self) -> int:
        """Query heads of one kv head in a tile."""
        return min(self.group, self.rows)

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return self.rows // self.members

    @property
    def fields(self) -> dict[str, int]:
        """Returns the tiles as fields of a config."""
        return {
            "num_queries_per_block": self.tile,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def choose(problem: RaggedProblem, target: Target) -> RaggedTiles:
    """Returns the heuristic tiles."""
    p, tokens = problem.paged, decode_tokens(problem)
    decode = decode_tiles.choose(replace(p, tokens=tokens), target)
    columns = power_of_two(sum(column_parts(p)[0]))
    rows, block, warps, stages = _sizes(problem, target, columns)
    # no more rows than there are, no more keys than a sequence can have
    rows = max(16, min(rows, power_of_two(problem.rows * p.group)))
    block = max(16, min(block, power_of_two(p.capacity)))
    if rows < 64:
        warps = min(warps, 4)
    tiles = RaggedTiles(
        rows, block, warps, stages, decode, MIN_SPLIT_KEYS, group=p.group, decode_tokens=tokens
    )
    return _fit(tiles, problem, target)


def decode_tokens(problem: RaggedProblem) -> int:
    """Returns the most new tokens of a sequence that is decoded: those that fit one matmul."""
    p = problem.paged
    rows, chunks = query_rows(p)
    fit = rows // p.group if chunks == 1 else 1
    most = problem.rows if problem.max_query_len is None else problem.max_query_len
    return max(1, min(fit, MAX_DECODE_TOKENS, problem.rows, most))


def decode_problem(problem: RaggedProblem, tiles: RaggedTiles) -> PagedProblem:
    """Returns the problem of the sequences that are decoded."""
    return replace(problem.paged, tokens=tiles.decode_tokens)


def _sizes(problem: RaggedProblem, target: Target, columns: int) -> tuple[int, int, int, int]:
    p = problem.paged
    if needs_float32(p):
        # float32 matmuls in three, operands in registers
        return 16, 32 if columns <= 128 else 16, 4, 1
    if target.platform == "rocm":
        # 64 KiB of shared memory, no asynchronous copies
        return (128, 32, 4, 1) if columns <= 128 else (64, 32, 8, 1)
    if columns > 128:
        # an accumulator of 128 rows would take half the registers of eight warps, the addresses of
        # gathered keys the rest
        return 64, 32, 8, 2
    if target.hopper and not p.is_eight_bit:
        # one warp group of 64 rows, three stages: two programs share a multiprocessor, and one
        # computes while the other looks up its tile, waits for its first keys or stores. Of 64
        # columns as many bytes a step: the assembler makes matmuls of square tiles wait for each
        # other
        return (64, 128, 4, 2) if columns == 64 else (64, 64, 4, 3)
    # operands from registers leave room for half the keys
    return (128, 64, 8, 3) if target.hopper else (128, 32, 8, 3)


def shared_bytes(problem: RaggedProblem, rows: int, block: int, stages: int) -> int:
    """Returns the shared memory of a program: steps in flight, queries, probabilities."""
    p = problem.paged
    width = 4 if needs_float32(p) else 2
    step_bytes = block * p.token_bytes * stages
    if p.is_eight_bit:
        step_bytes += block * p.dim * 2 * width  # converted, for matmuls that read shared memory
    return step_bytes + rows * (p.dim + block) * width


def _fit(tiles: RaggedTiles, problem: RaggedProblem, target: Target) -> RaggedTiles:
    """Returns tiles made smaller until their shared memory fits, or as small as they get."""
    limit = target.shared_limit
    while shared_bytes(problem, tiles.rows, tiles.block, tiles.num_stages) > limit:
        if tiles.num_stages > 2:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.block > 32:
            tiles = replace(tiles, block=tiles.block // 2)
        elif tiles.rows > 64:
            tiles = replace(tiles, rows=tiles.rows // 2)
        else:
            break
    return tiles


def can_use_tma(p: PagedProblem, block: int, target: Target) -> bool:
    """Returns whether keys and values are read by TMA: a block in one page, a head in one box.

    Keys behind the last are cut off by the descriptor, those before a window are not.
    """
    return (
        target.hopper
        and target.tensor_maps
        and p.page_size % block == 0
        and p.window_left is None
        and p.query_dtype == p.key_dtype != "float32"
        and column_parts(p)[0] == (p.dim, 0)
        and p.pages * p.page_size < MAP_ROWS
    )


def decode_ranges(problem: RaggedProblem, tiles: RaggedTiles, target: Target) -> int:
    """Returns the number of equal work ranges of all decoded keys."""
    p = problem.paged
    if tiles.decode.splits is not None:
        return p.batch * tiles.decode.splits
    if tiles.splits is None:
        return decode_tiles.count_work_ranges(decode_problem(problem, tiles), tiles.decode, target)
    longest = -(-p.capacity // tiles.decode.block)
    return max(1, p.batch * min(tiles.splits, longest))


def is_few_rows(problem: RaggedProblem, tiles: RaggedTiles) -> bool:
    """Returns whether a call is one of few rows, which ``few_rows`` attends to in one launch.

    A row for each sequence at most is the shape of a call that only decodes. Whatever its values,
    no sequence has more chunks than are worth another launch; a plan can promise that of more rows.
    Its work ranges cut a sequence where others end, so that it never serves batch-invariant calls,
    whose splits are fixed.
    """
    if tiles.decode.splits is not None or tiles.long_prefill is not None:
        return False
    rows, n, tokens = problem.rows, problem.sequences, tiles.decode_tokens
    most = MAX_REPEATED_READS * tokens
    few = rows <= tokens or rows <= min(n, max(MAX_DECODE_TOKENS, most))
    if problem.planned:
        promised = problem.max_query_len is not None and problem.max_query_len <= most
        return (few or promised) and rows <= MAX_PLANNED_ROWS
    return few and power_of_two(rows) * power_of_two(n) <= MAX_COMPARISONS


def few_row_ranges(problem: RaggedProblem, tiles: RaggedTiles, target: Target) -> int:
    """Returns the number of equal work ranges of all keys of few rows.

    As ``count_short_ranges``, or fewer, where as many programs run as of ``decode``.
    """
    p, t = problem.paged, tiles.decode
    longest = -(-p.capacity // t.block)
    if tiles.splits is not None:
        return max(1, problem.rows * min(tiles.splits, longest))
    _, chunks = query_rows(decode_problem(problem, tiles), t.max_rows)
    heads, steps = p.kv_heads * chunks, problem.rows * longest
    ranges = decode_tiles.count_short_ranges(steps, heads, target)
    return max(1, min(ranges, t.programs_per_core * target.cores // heads, steps))


def count_counters(problem: RaggedProblem, tiles: RaggedTiles) -> int:
    """Returns the counters of few rows: of finished programs, for each row and program of it."""
    p = problem.paged
    _, chunks = query_rows(decode_problem(problem, tiles), tiles.decode.max_rows)
    return problem.rows * p.kv_heads * chunks


def max_split_units(problem: RaggedProblem, tiles: RaggedTiles, target: Target) -> int:
    """Returns the most work units of tiles with several splits, for each kv head: one round.

    Few tiles of one length then are one round of programs, and their partial results are small. A
    program of eight warps has a multiprocessor to itself, of four half of it.
    """
    chunks = -(-tiles.group // tiles.members)
    programs = target.cores * max(1, 8 // tiles.num_warps)
    return max(1, programs // (problem.paged.kv_heads * chunks))


def max_units(problem: RaggedProblem, tiles: RaggedTiles, max_split_units: int) -> int:
    """Returns the most work units of any mix: full tiles, one more a sequence, and splits."""
    t = problem.rows
    prefilled = min(problem.sequences, t // (tiles.decode_tokens + 1))
    return t // tiles.tile + prefilled + max_split_units


def neighbours(problem: RaggedProblem, target: Target, chosen: RaggedTiles) -> list[RaggedTiles]:
    """Returns tiles worth timing: half or twice the rows and warps, a stage more or less."""
    candidates = [
        replace(chosen, rows=rows, num_warps=warps, num_stages=stages)
        for rows, warps in (
            (chosen.rows, chosen.num_warps),
            (chosen.rows // 2, 4),
            (chosen.rows * 2, 8),
        )
        for stages in (chosen.num_stages - 1, chosen.num_stages, chosen.num_stages + 1)
        if 16 <= rows <= 128 and stages >= 1
    ]
    return [
        t
        for t in candidates
        if shared_bytes(problem, t.rows, t.block, t.num_stages) <= target.shared_limit
    ]
