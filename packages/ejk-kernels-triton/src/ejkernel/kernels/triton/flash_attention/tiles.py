"""Tile sizes for flash attention: arithmetic with a reason beside each line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton.flash_attention.problem import Problem, exact_dim, split_dim
from ejkernel.kernels.triton.targets import Target


@dataclass(frozen=True)
class Tiles:
    """Tile of one kernel: rows of queries and keys it holds, and how it is launched."""

    block_q: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 2


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
        # tiles of the bias are staged in shared memory beside keys and values
        return Tiles(
            64 if short or dim > 128 else 128, 32 if dim > 128 else 64, 4 if short else 8, 2
        )
    if problem.dtype == "float32":
        # tf32 or full products from registers: a quarter of the tile keeps operands in them
        return Tiles(32 if problem.precision == "ieee" else 64, 32, 4, 2 if dim <= 64 else 1)
    if target.hopper:
        if dim <= 64:
            return Tiles(64 if short else 128, 128, 4 if short else 8, 3)
        if dim <= 128:
            # two warp groups of 64 rows share each key tile; 128 x 128 fills the registers
            return Tiles(64, 128, 4, 2) if short else Tiles(128, 128, 8, 2)
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
    if problem.biased:
        return Tiles(64, 64 if dim <= 128 else 32, 8, 1)
    if target.hopper:
        if dim <= 64:
            return Tiles(128, 128, 8, 2)
        if dim <= 128:
            return Tiles(128, 64, 8, 2)
        # one accumulator of 128 x 256 fills half the registers; a second stage would spill
        return Tiles(128, 64, 8, 1)
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
    if problem.biased:
        return Tiles(64, 64 if dim <= 128 else 32, 8, 1)
    if target.hopper:
        if dim <= 64:
            return Tiles(64, 128, 8, 3)
        if dim <= 128:
            return Tiles(64, 128, 8, 2)
        # two accumulators of 32 x 256: with 64 keys they would spill
        return Tiles(64, 32, 8, 1)
    if target.platform == "rocm":
        return Tiles(32, 64, 4, 1)
    if dim <= 128:
        return Tiles(64, 64, 4 if dim <= 64 else 8, 2)
    return Tiles(32, 64, 8, 1)


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
    return replace(tiles, **{k: int(v) for k, v in given.items() if v is not None})


def neighbours(tiles: Tiles, problem: Problem) -> list[Tiles]:
    """Tiles one step away: half or twice the keys, half the rows with half the warps, a stage."""
    near = [
        replace(tiles, block_kv=tiles.block_kv // 2),
        replace(tiles, block_q=tiles.block_q // 2, num_warps=max(4, tiles.num_warps // 2)),
        replace(tiles, num_stages=tiles.num_stages + 1),
        replace(tiles, block_kv=tiles.block_kv * 2),
    ]
    return [t for t in near if min(t.block_q, t.block_kv) >= 16 and t.block_kv <= 256]
