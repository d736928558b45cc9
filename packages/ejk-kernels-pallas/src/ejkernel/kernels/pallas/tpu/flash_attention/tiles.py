"""Tile sizes of TPU flash attention: arithmetic with a reason beside each line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.types import attention as arg
from ejkernel.types.problem import Problem

LANES = 128
LARGEST = 1024  # a config names no larger tile


@dataclass(frozen=True)
class Tiles:
    """Tile of one kernel.

    Attributes:
        block_q, block_kv: queries and keys of a grid step.
        rows: rows of the held side whose products and exponentials overlap at a time.
        unpacked: probabilities enter their product as float32: a matrix unit of 128 columns takes
            them at the rate of bfloat16, and packing them costs vector slots.
    """

    block_q: int
    block_kv: int
    rows: int
    unpacked: bool = False

    @staticmethod
    def edge(block: int) -> int:
        """Side of the tiles a masked block is cut into: those outside the mask are skipped."""
        return min(block, 256)

    def vmem(self, problem: Problem, held: int, accumulators: int) -> int:
        """Bytes of vector memory of a kernel, about.

        Two buffers of every block fetched or stored (queries, keys, values, output or gradients),
        float32 accumulators and columns of ``held`` rows, and strips of products in flight: at
        most four of ``rows`` by the walked block.
        """
        dims, walked = _dim(problem), self.block_q + self.block_kv - held
        blocks = 2 * problem.itemsize * dims * 2 * (self.block_q + self.block_kv)
        kept = 4 * held * (accumulators * dims + 5 * LANES)
        return blocks + kept + 4 * 4 * self.rows * walked + 4 * 4 * walked * dims


def _block(length: int, largest: int) -> int:
    """The largest power of two that wastes at most an eighth of ``length`` rounded to lanes."""
    rounded = -(-length // LANES) * LANES
    block = largest
    while block > LANES and (-(-length // block) * block) * 8 > rounded * 9:
        block //= 2
    return block


def _dim(problem: Problem) -> int:
    return max(-(-d // LANES) * LANES for d in (problem.dim, problem.value_dim))


def forward_tiles(problem: Problem, chip: Chip) -> Tiles:
    """Tiles of the forward kernel."""
    narrow = chip.mxu <= 128
    # one grid step costs some 200 bundles of scalar work: tiles of 2^20 pairs make it under 5%
    block_q = _block(problem.q_len, LARGEST)
    # keys of a step: their products of `rows` queries must fit in what is left of 64 registers
    # and 2-slot stores; wide units are fed for twice as long by one load of weights
    block_kv = _block(problem.kv_len, 512 if narrow else LARGEST)
    if problem.itemsize == 4 or _dim(problem) > 256:
        block_q, block_kv = min(block_q, 512), min(block_kv, 512)
    # products of the next rows run under the exponentials of these
    rows = min(256 if narrow else 512, block_q)
    return Tiles(block_q, block_kv, rows, unpacked=narrow)


def dq_tiles(problem: Problem, chip: Chip) -> Tiles:
    """Tiles of the query gradient: queries held, keys walked."""
    return replace(forward_tiles(problem, chip), rows=min(256, _block(problem.q_len, LARGEST)))


def dkv_tiles(problem: Problem, chip: Chip) -> Tiles:
    """Tiles of the key gradients: keys held, queries walked."""
    narrow = chip.mxu <= 128
    block_kv = _block(problem.kv_len, LARGEST)
    block_q = _block(problem.q_len, 512 if narrow else LARGEST)
    if problem.itemsize == 4 or _dim(problem) > 256:
        block_q, block_kv = min(block_q, 512), min(block_kv, 512)
    return Tiles(block_q, block_kv, min(256, block_kv), unpacked=narrow)


FIELDS = {"block_q": "q_blocksize", "block_kv": "kv_blocksize"}
DQ_FIELDS = {"block_q": "blocksize_m", "block_kv": "blocksize_n"}


def override(tiles: Tiles, params: Any, fields: Mapping[str, str] = FIELDS) -> Tiles:
    """``tiles`` with what a config says instead, in whole registers of 128 lanes."""
    given = {mine: arg.field(params, theirs) for mine, theirs in fields.items()}
    sizes = {k: max(LANES, int(v)) for k, v in given.items() if v is not None}
    new = replace(tiles, **sizes)
    return replace(new, rows=min(new.rows, new.block_q, new.block_kv))


def neighbours(tiles: Tiles) -> list[Tiles]:
    """Tiles one step away: half or twice the queries, half or twice the keys."""
    near = [
        replace(tiles, block_q=tiles.block_q // 2),
        replace(tiles, block_kv=tiles.block_kv // 2),
        replace(tiles, block_q=tiles.block_q * 2),
        replace(tiles, block_kv=tiles.block_kv * 2),
    ]
    return [
        t
        for t in near
        if LANES <= min(t.block_q, t.block_kv) and max(t.block_q, t.block_kv) <= LARGEST
    ]
