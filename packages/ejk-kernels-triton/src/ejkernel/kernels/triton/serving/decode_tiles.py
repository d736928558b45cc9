"""Tiles of decoding: arithmetic, with a reason next to each line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton.kernel import override_tiles
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.serving.params import column_parts, has_narrow_tail, needs_float32
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.params import TILE_RANGE, config_field
from ejkernel.types.serving.problem import PagedProblem

# tile field to config field
LAUNCHED = {name: name for name in ("num_warps", "num_stages", "num_launches")}
MIN_BLOCK = 16  # tokens: a matrix instruction has no fewer columns
SHORT_TOKENS = 4096  # of a table where a single sequence is merged in the launch that reads it
SHORT_STEPS = 4  # of a work range where the last program merges
MAX_ROWS = 64  # query heads of one program: more fill the registers with accumulators


@dataclass(frozen=True)
class DecodeTiles:
    """Tiles of a decoding launch.

    Attributes:
        block: tokens read at a time, a power of two of at least 16.
        num_warps, num_stages: of the program that reads them.
        programs_per_core: programs meant to run together on one multiprocessor.
        setup_tiles: time of another sequence in a work range, in tiles.
        splits: splits of every sequence; None: equal work ranges of the full cache.
        pages: ``block`` in pages, where a config says it.
        max_rows: query rows of one matmul, at most.
        opaque: whether warps are distributed along keys in the matmul of scores, behind an opaque
            flag (``attend_block``).
        tma: whether steps are read by TMA; only where keys hold their values.
        form: form of scores with 8-bit keys (``eight_bit_scores``); only where keys hold their
            values and are read by TMA.
        num_launches: 1: the programs of a single sequence merge their partial results. Other calls
            have a second launch that merges.
        last_merges: whether in one launch the last program of a block of query rows merges them.
            Else all of its programs wait for each other and share the rows, where all programs of
            the launch run at the same time.
        convert_once: whether 8-bit values are converted once for both matmuls, which then read
            shared memory; only where keys hold their values.
    """

    block: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_core: int = 2
    setup_tiles: int = 0
    splits: int | None = None
    pages: int | None = None
    max_rows: int = MAX_ROWS
    opaque: bool = False
    tma: bool = False
    form: str = ""
    convert_once: bool = False
    num_launches: int = 2
    last_merges: bool = False

    @property
    def fields(self) -> dict[str, int]:
        """Returns the tiles as fields of a config."""
        fields = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return fields if self.pages is None else {"pages_per_block": self.pages, **fields}

    def launch_options(self, target: Target) -> dict[str, int]:
        """Returns the compiler's options of a launch that reads keys."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if target.platform != "cuda":
            return options
        # without a bound the assembler spills to fit more programs than are meant to run together
        registers = min(255, 2048 // (self.num_warps * self.programs_per_core) // 8 * 8)
        return options | {"maxnreg": registers}

    def apply_config(self, cfg: Any, problem: PagedProblem, target: Target) -> DecodeTiles:
        """Returns the tiles with the values of a config, then the splits that the call asks for."""
        tiles, pages = override_tiles(self, cfg, LAUNCHED), config_field(cfg, "pages_per_block")
        if pages is not None:
            tiles = replace(tiles, block=block_of_pages(int(pages), problem, target))
        splits, min_tokens = problem.num_splits, 1
        if splits is None:
            splits, min_tokens = config_field(cfg, "num_splits"), MIN_BLOCK
        if splits is None:
            return tiles
        return replace(tiles, splits=max(1, min(int(splits), -(-problem.capacity // min_tokens))))

    def apply_block_config(self, params: Any) -> DecodeTiles:
        """Returns the tiles with forward params of a config, for caches without pages."""
        tiles, block = override_tiles(self, params, LAUNCHED), config_field(params, "kv_blocksize")
        if block is not None:
            tiles = replace(tiles, block=max(MIN_BLOCK, power_of_two(int(block))))
        return tiles


def block_of_pages(pages: int, problem: PagedProblem, target: Target) -> int:
    """Returns the tokens of a step of ``pages``.

    A step is at most one sequence, and at most what shared memory holds. Larger ones would only
    keep the compiler busy, a minute for 1024 latent rows.
    """
    max_tokens = max(1, target.shared_limit // max(1, problem.token_bytes))
    limit = min(TILE_RANGE[1], power_of_two(problem.capacity), 1 << max_tokens.bit_length() - 1)
    return max(MIN_BLOCK, min(limit, power_of_two(pages * problem.page_size)))


def query_rows(problem: PagedProblem, max_rows: int = MAX_ROWS) -> tuple[int, int]:
    """Returns (rows, chunks): query heads in one matmul, and the programs that share a kv head.

    A matrix instruction has 16 rows; rows beyond the group cost nothing that limits. Float32
    matmuls are done in three, each with operands in registers: 16 rows only.
    """
    max_rows = 16 if needs_float32(problem) else max_rows
    members = problem.group * problem.tokens
    rows = min(max_rows, max(16, power_of_two(members)))
    return rows, -(-members // rows)


def shared_bytes(problem: PagedProblem, block: int, stages: int) -> int:
    """Returns the shared memory of a program: steps, queries, probabilities, reductions."""
    rows, _ = query_rows(problem)
    width = 4 if needs_float32(problem) else 2
    return (
        block * problem.token_bytes * max(1, stages - 1)
        + rows * (problem.dim + block) * width
        + 4096
    )


def choose(problem: PagedProblem, target: Target) -> DecodeTiles:
    """Returns the heuristic tiles."""
    # partial results of few rows are merged in one wait for memory, as soon as waiting for others
    few = problem.group * problem.tokens * power_of_two(problem.value_dim) <= 1024
    tiles = replace(_choose_split_tiles(problem, target), last_merges=few)
    # a call of 1024 tokens in a chain on an H200: 6.4 us for 10.3, of 4096 9.8 for 11.7
    is_short = few and problem.batch == 1 and problem.capacity <= SHORT_TOKENS
    return replace(tiles, num_launches=1) if is_short else tiles


def _choose_split_tiles(problem: PagedProblem, target: Target) -> DecodeTiles:
    """Returns the tiles of ``paged_split``; how partial results are merged is not chosen here."""
    rows, _ = query_rows(problem)
    columns = power_of_two(max(map(sum, column_parts(problem))))
    # operands of the matmuls go through registers: 64 tokens of 128 columns fill a third of
    # the registers of four warps, float32 operands twice that
    block = 8192 // columns // (2 if needs_float32(problem) else 1)
    warps = 8 if rows * columns > 64 * 64 or (needs_float32(problem) and columns > 128) else 4
    if has_narrow_tail(problem):
        block //= 2  # a narrow second part takes as many pointers as a wide one
    elif problem.is_eight_bit and not needs_float32(problem) and warps == 4:
        block *= 2  # 8-bit values take half the registers until they are used: as many bytes a step
    block = max(16, min(128, block))
    # no step longer than the longest sequence
    block = max(16, min(block, power_of_two(problem.capacity)))
    if target.platform == "rocm":
        # no asynchronous copies: loads go through registers, occupancy hides latency
        limit = 32 if problem.is_eight_bit and warps == 8 else 64
        return DecodeTiles(min(block, limit), warps, 1, 2)
    # the deepest pipeline that leaves room for a second program, whose loads fly while the first
    # one computes: at least 64 KiB in flight a multiprocessor hide the latency of memory
    stages = next(
        (n for n in (5, 4, 3) if 2 * shared_bytes(problem, block, n) <= target.shared_limit), 2
    )
    # two programs of four warps, or one of eight, may use every register they can name
    room = target.shared_limit // shared_bytes(problem, block, stages)
    return DecodeTiles(block, warps, stages, max(1, min(8 // warps, room)))


def count_work_ranges(problem: PagedProblem, tiles: DecodeTiles, target: Target) -> int:
    """Returns the number of equal work ranges of the full cache: as many as fill the chip once.

    A range per head and chunk runs as a program. With more than a quarter of the chip's programs
    in one range a single round would leave the others idle: then four rounds.
    """
    _, chunks = query_rows(problem, tiles.max_rows)
    heads = problem.kv_heads * chunks
    room = target.cores * tiles.programs_per_core
    ranges = room // heads if 4 * heads <= room else -(-4 * room // heads)
    steps = problem.batch * -(-problem.capacity // tiles.block)
    if tiles.num_launches == 1 and tiles.last_merges and problem.batch == 1:
        ranges = min(ranges, count_short_ranges(steps, heads, target))
    return max(1, min(ranges, steps))


def count_short_ranges(steps: int, heads: int, target: Target) -> int:
    """Returns the work ranges of a call whose last programs merge.

    A program has SHORT_STEPS steps, whose loads are in flight together, so that few partial
    results merge in one wait; or fewer, so that every multiprocessor has a program.
    """
    return max(steps // SHORT_STEPS, target.cores // heads)


def can_merge_at_end(
    problem: PagedProblem, tiles: DecodeTiles, ranges: int, target: Target
) -> bool:
    """Returns whether the launch that reads the keys merges too."""
    programs = ranges * problem.kv_heads * query_rows(problem, tiles.max_rows)[1]
    can_wait = programs <= target.cores * tiles.programs_per_core
    is_single = tiles.num_launches == 1 and problem.batch == 1
    return is_single and (tiles.last_merges or can_wait)


def neighbours(problem: PagedProblem, target: Target, chosen: DecodeTiles) -> list[DecodeTiles]:
    """Returns tiles worth timing: steps of half to double the bytes, two to five stages."""
    size = max(problem.page_size, 1)
    return [
        replace(chosen, block=block, num_warps=warps, num_stages=stages, pages=block // size)
        for block in (chosen.block // 2, chosen.block, chosen.block * 2)
        for warps in (4, 8)
        for stages in (2, 3, 4, 5)
        if block >= max(16, size) and shared_bytes(problem, block, stages) <= target.shared_limit
    ]
