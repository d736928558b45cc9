"""Tile sizes for flash attention: arithmetic with a reason beside each line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton.flash_attention.dims import exact_dim, split_dim
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.problem import Problem


@dataclass(frozen=True)
class Tiles:
    """Tile of one kernel: rows of queries and keys it holds, and how it is launched.

    ``registers``: bound on the registers of a thread, so that more programs share a
    multiprocessor; None leaves it to the compiler.
    """

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Compiler options beyond warps and stages."""
        return {} if self.registers is None else {"maxnreg": self.registers}


def _padded(dim: int) -> int:
    return sum(split_dim(dim))


def can_use_tensor_maps(problem: Problem, target: Target) -> bool:
    """Whether tiles of keys and values can be read by TMA.

    Needs Hopper or newer, two-byte elements, head dims that are one or two powers of two (a box
    of columns must not reach into the next head) and rows of whole 16 bytes.
    """
    return (
        target.platform == "cuda"
        and int(target.arch) >= 90
        and problem.itemsize == 2
        and exact_dim(problem.dim)
        and exact_dim(problem.value_dim)
        and min(problem.dim, problem.value_dim) >= 16
    )


def forward_tiles(problem: Problem, target: Target) -> Tiles:
    """Tiles of the forward kernel."""
    dim = max(_padded(problem.dim), _padded(problem.value_dim))
    short = problem.q_len <= 64
    if problem.biased and problem.dtype != "float32":
        if target.hopper and dim <= 128:
            # programs overlap as below; the tiles of the bias take the room of a third stage
            return Tiles(64, 64, 4, 2)
        # tiles of the bias are staged in shared memory beside keys and values
        return Tiles(
            64 if short or dim > 128 else 128, 32 if dim > 128 else 64, 4 if short else 8, 2
        )
    if problem.dtype == "float32":
        # tf32 or full products from registers: a quarter of the tile keeps operands in them
        return Tiles(32 if problem.precision == "ieee" else 64, 32, 4, 2 if dim <= 64 else 1)
    if target.hopper:
        if dim <= 128:
            # one warp group of 64 rows waits for its own products before its exponentials, so
            # programs must overlap instead: three stages of 64 x 128 keys and values take 112 KiB
            # (of 64 columns 56 KiB), which leaves room for two (four) programs a multiprocessor
            return Tiles(64, 64, 4, 3)
        # the accumulator alone is 64 KiB a warp group: fewer keys at a time
        return Tiles(64, 64, 4, 2) if short else Tiles(128, 64, 8, 2)
    if target.platform == "rocm":
        # 64 KiB of shared memory, no asynchronous copies: one stage
        return Tiles(128 if dim <= 128 else 64, 64 if dim <= 128 else 32, 4, 1)
    if dim <= 64:
        return Tiles(64 if short else 128, 64, 4, 3)
    if dim <= 128:
        return Tiles(64, 64, 4, 2) if short else Tiles(128, 64, 8, 3)
    return Tiles(64, 64, 8, 2)


def dq_tiles(problem: Problem, target: Target) -> Tiles:
    """Tiles of the query gradient: queries and output gradients held, keys and values walked."""
    dim = max(_padded(problem.dim), _padded(problem.value_dim))
    if problem.dtype == "float32":
        return Tiles(32, 32, 4, 1)
    if problem.biased and not (target.hopper and dim <= 128):
        return Tiles(64, 64 if dim <= 128 else 32, 8, 1)
    if target.hopper:
        if dim <= 64:
            # 64 KiB: three programs a multiprocessor, one exponentiates while others multiply
            return Tiles(64, 64, 4, 3)
        if dim <= 128:
            # 96 KiB: two programs; a third stage would leave one
            return Tiles(64, 64, 4, 2)
        # one accumulator of 128 x 256 fills half the registers; 128 KiB of queries and output
        # gradients leave room for two stages of 32 keys
        return Tiles(128, 32, 8, 2)
    if target.platform == "rocm":
        return Tiles(64, 32, 4, 1)
    if dim <= 128:
        return Tiles(64, 64, 4, 2)
    return Tiles(64, 32, 8, 1)


def dkv_tiles(problem: Problem, target: Target) -> Tiles:
    """Tiles of the key gradients: keys and values held, queries and output gradients walked."""
    dim = max(_padded(problem.dim), _padded(problem.value_dim))
    if problem.dtype == "float32":
        return Tiles(32, 32, 4, 1)
    if problem.biased and not (target.hopper and dim <= 128):
        return Tiles(64, 64 if dim <= 128 else 32, 8, 1)
    if target.hopper:
        if dim <= 64:
            # 64 KiB, and 168 of the registers of a multiprocessor's 384 threads: three programs
            plain = not problem.biased and problem.soft_cap is None and not problem.dropout
            return Tiles(64, 64, 4, 3, 168 if plain else None)
        if dim <= 128:
            # two accumulators of 64 x 128 are 128 registers a thread; 96 KiB: two programs
            return Tiles(64, 64, 4, 2)
        # one accumulator at a time (see ``key_passes``): 128 x 256 is 128 registers a thread;
        # 128 KiB of keys and values leave room for two stages of 32 rows
        return Tiles(32, 128, 8, 2)
    if target.platform == "rocm":
        return Tiles(32, 64, 4, 1)
    if dim <= 128:
        return Tiles(64, 64, 4 if dim <= 64 else 8, 2)
    return Tiles(32, 64, 8, 1)


def key_passes(
    problem: Problem, tiles: Tiles, target: Target
) -> tuple[tuple[tuple[str, ...], Tiles], ...]:
    """Which key gradients each launch computes, and its tiles.

    Both in one launch is four products a tile, apart it is two (dv) and three (dk). Apart is
    faster where both accumulators would take more than half of the 255 registers a thread has.
    """
    columns = _padded(problem.dim) + _padded(problem.value_dim)
    threads = target.warp_size * tiles.num_warps
    if not target.hopper or tiles.block_kv * columns <= 128 * threads:
        return ((("dk", "dv"), tiles),)
    # dv needs no values: room for twice the rows a stage
    rows = tiles.block_q if problem.itemsize == 4 else min(64, 2 * tiles.block_q)
    return (("dk",), tiles), (("dv",), replace(tiles, block_q=rows))


FIELDS = {
    "block_q": "q_blocksize",
    "block_kv": "kv_blocksize",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
DQ_FIELDS = FIELDS | {"block_q": "blocksize_m", "block_kv": "blocksize_n"}


def field(source: Any, name: str) -> Any:
    """``source.name`` or ``source[name]``; None when absent."""
    if source is None:
        return None
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def override(tiles: Tiles, params: Any, fields: Mapping[str, str] = FIELDS) -> Tiles:
    """``tiles`` with what ``fwd_params`` or ``bwd_params`` of a config says instead."""
    given = {mine: field(params, theirs) for mine, theirs in fields.items()}
    new = replace(tiles, **{k: int(v) for k, v in given.items() if v is not None})
    # a bound on registers was chosen for these sizes only
    return tiles if new == tiles else replace(new, registers=None)


def neighbours(tiles: Tiles, problem: Problem) -> list[Tiles]:
    """Tiles one step away: half or twice the keys, half the rows with half the warps, a stage."""
    near = [
        replace(tiles, block_kv=tiles.block_kv // 2),
        replace(tiles, block_q=tiles.block_q // 2, num_warps=max(4, tiles.num_warps // 2)),
        replace(tiles, num_stages=tiles.num_stages + 1),
        replace(tiles, block_kv=tiles.block_kv * 2),
    ]
    return [t for t in near if min(t.block_q, t.block_kv) >= 16 and t.block_kv <= 256]
