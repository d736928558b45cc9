"""Tile sizes of TPU flash attention: arithmetic with a reason next to each line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.params import config_field
from ejkernel.types.attention.problem import Problem

# fields of a config by fields of tiles
FIELDS = {"block_q": "q_blocksize", "block_kv": "kv_blocksize"}
DQ_FIELDS = {"block_q": "blocksize_m", "block_kv": "blocksize_n"}
LARGEST = 1024  # a config names no larger tile
STRIP = 512  # rows of logits, at most, that vector memory holds at once
NOT_FUSED = (
    "vector memory does not hold the gradient of all queries of a head, or one head would have to "
    "occupy two cores"
)
KEYS_OUTER = ("dkv", "fused")  # kernels that hold keys and loop over queries
# Smaller parts follow a diagonal more closely, but have too few matmuls to hide the
# exponentials: 256 x 256 takes half the bundles of 512 x 512, a quarter of whose pairs it has.
EDGE = 512


@dataclass(frozen=True)
class Tiles:
    """Tile of one kernel.

    Attributes:
        block_q, block_kv: queries and keys of a grid step.
        rows, columns: tokens along sublanes and along lanes of the tiles that a block is cut into;
            matmuls of a tile overlap the exponentials of the one before it.
        unpacked: probabilities enter their matmul as float32: a matrix unit of 128 columns takes
            them at the rate of bfloat16, and packing them costs vector slots.
        transposed: gradients are accumulated as ``[d, tokens]`` (see dq and dkv).
        joins_heads: arrays are read and written as ``[b, 1, s, h * d]``, not ``[b, h, s, d]``.
    """

    block_q: int
    block_kv: int
    rows: int
    unpacked: bool = False
    transposed: bool = False
    columns: int = LARGEST
    joins_heads: bool = False

    @property
    def edge_q(self) -> int:
        """Queries of the parts a masked block is cut into; parts outside the mask are skipped."""
        return min(self.block_q, EDGE)

    @property
    def edge_kv(self) -> int:
        """Keys of these parts."""
        return min(self.block_kv, EDGE)

    def vmem(self, problem: Problem, outer: int, accumulators: int) -> int:
        """Bytes of vector memory of a kernel, about; ``outer``: tokens of an outer block.

        Two buffers of every block fetched or stored (queries, keys, values, output or gradients),
        float32 accumulators and at most five columns of ``outer`` rows, and spills: up to 12
        bytes a pair of a strip, never more than of STRIP rows.
        """
        dims, inner = _dim(problem), self.block_q + self.block_kv - outer
        blocks = 2 * problem.itemsize * dims * 2 * (self.block_q + self.block_kv)
        outer_bytes = 4 * outer * (accumulators * dims + 5 * LANES)
        converted = 4 * inner * dims if self.unpacked else 0
        return blocks + outer_bytes + converted + 12 * min(self.rows, STRIP) * inner


@dataclass(frozen=True)
class FlashTiles:
    """Tiles of the kernels: forward, query gradient, key gradients; of all gradients in one kernel,
    which runs instead of the two where vector memory holds the queries of a head."""

    fwd: Tiles
    dq: Tiles
    dkv: Tiles
    fused: Tiles | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Returns the names of the kernels that run."""
        return ("fwd", "dkv", "dq") if self.fused is None else ("fwd", "fused")

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a config."""
        fwd = {field: getattr(self.fwd, name) for name, field in FIELDS.items()}
        keys = self.fused or self.dkv
        dkv = {field: getattr(keys, name) for name, field in FIELDS.items()}
        dq = {field: getattr(self.dq, name) for name, field in DQ_FIELDS.items()}
        joined = {"joins_heads": True} if self.fwd.joins_heads else {}
        return {"fwd_params": fwd, "bwd_params": dkv | dq} | joined

    def apply_config(self, cfg: Any, problem: Problem, target: Chip) -> FlashTiles:
        """Returns these tiles, overridden by a config."""
        fwd, bwd = config_field(cfg, "fwd_params"), config_field(cfg, "bwd_params")
        fuses, joins = config_field(cfg, "fuses_gradients"), config_field(cfg, "joins_heads")
        if fuses and self.fused is None:
            raise ConfigError(f"fuses_gradients=True: {NOT_FUSED}")
        if joins and (problem.dim % LANES or problem.value_dim % LANES):
            raise ConfigError(f"joins_heads=True: head dims in multiples of {LANES} alone")

        def applied(tiles: Tiles, params: Any, fields: Mapping[str, str] = FIELDS) -> Tiles:
            return replace(override(tiles, params, fields), joins_heads=bool(joins))

        fused = None if self.fused is None or fuses is False else applied(self.fused, bwd)
        dq, dkv = applied(self.dq, bwd, DQ_FIELDS), applied(self.dkv, bwd)
        return FlashTiles(applied(self.fwd, fwd), dq, dkv, fused)


def choose(problem: Problem, target: Chip) -> FlashTiles:
    """The tiles of a call by the arithmetic below."""
    return FlashTiles(
        forward_tiles(problem, target),
        dq_tiles(problem, target),
        dkv_tiles(problem, target),
        fused_tiles(problem, target),
    )


def _block(length: int, largest: int) -> int:
    """The largest power of two that wastes at most an eighth of ``length`` rounded to lanes."""
    rounded = -(-length // LANES) * LANES
    block = largest
    while block > LANES and (-(-length // block) * block) * 8 > rounded * 9:
        block //= 2
    return block


def _dim(problem: Problem) -> int:
    """The larger head dim, in full registers of 128 lanes."""
    return max(-(-d // LANES) * LANES for d in (problem.dim, problem.value_dim))


def forward_tiles(problem: Problem, chip: Chip) -> Tiles:
    """Tiles of the forward kernel."""
    narrow = chip.mxu <= 128
    # a grid step costs some 200 bundles of scalar work: against tiles of 2^19 pairs that is 10% on
    # the fastest chips, against half of that 20%
    block_q = _block(problem.q_len, LARGEST)
    # a wide unit holds more keys at a time; for a narrow one more keys only mean more spills
    block_kv = _block(problem.kv_len, 512 if narrow else LARGEST)
    if problem.itemsize == 4:  # twice the bytes of everything
        block_q, block_kv = min(block_q, 512), min(block_kv, 512)
    # matmuls of the next strip overlap the exponentials of this one: more rows hide more of
    # the latency, but spill more; chips with two vector slots a bundle are slower to spill
    rows = 256 if narrow and chip.generation > 4 else 512
    return _fitting(Tiles(block_q, block_kv, min(rows, block_q), unpacked=narrow), problem, chip, 1)


def _fitting(tiles: Tiles, problem: Problem, chip: Chip, accumulators: int) -> Tiles:
    """``tiles`` with strips halved until vector memory suffices, then blocks.

    ``accumulators``: of the outer side; kernels with two have keys there.
    """
    outer = tiles.block_kv if accumulators == 2 else tiles.block_q
    if tiles.vmem(problem, outer, accumulators) <= chip.vmem or outer <= LANES:
        return tiles
    if tiles.rows > LANES:
        return _fitting(replace(tiles, rows=tiles.rows // 2), problem, chip, accumulators)
    smaller = replace(
        tiles, block_q=max(tiles.block_q // 2, LANES), block_kv=max(tiles.block_kv // 2, LANES)
    )
    return _fitting(smaller, problem, chip, accumulators)


def _gradient_blocks(problem: Problem) -> tuple[int, int]:
    """Queries and keys of a grid step of the gradient kernels."""
    # two more operands than forward, all of them used twice: large tiles load weights less often
    block_q, block_kv = _block(problem.q_len, LARGEST), _block(problem.kv_len, LARGEST)
    return (min(block_q, 512), min(block_kv, 512)) if problem.itemsize == 4 else (block_q, block_kv)


def dq_tiles(problem: Problem, chip: Chip) -> Tiles:
    """Tiles of the query gradient: outer queries, inner keys."""
    block_q, block_kv = _gradient_blocks(problem)
    if chip.mxu > 128:
        # a gradient [tokens, d] half fills a unit of 256 columns up to d 128, and at d 256 has a
        # weight a row to load; [d, tokens] has neither. A strip that loads less spills less.
        rows, columns = min(256, block_kv), min(512, block_q)
        tiles = Tiles(block_q, block_kv, rows, transposed=True, columns=columns)
    else:
        if _dim(problem) > LANES:  # the operands of a strip fill the loads: fewer keys at a time
            block_kv = min(block_kv, 512)
        tiles = Tiles(block_q, block_kv, min(512, block_q))
    return _fitting(tiles, problem, chip, 1)


def dkv_tiles(problem: Problem, chip: Chip) -> Tiles:
    """Tiles of the key gradients: outer keys, inner queries."""
    block_q, block_kv = _gradient_blocks(problem)
    large = _dim(problem) > LANES
    if chip.mxu > 128 and not large:  # as dq
        rows, columns = min(256, block_q), min(512, block_kv)
        tiles = Tiles(block_q, block_kv, rows, transposed=True, columns=columns)
    elif chip.mxu > 128:
        # no running maximum to wait for: one strip loads every weight once, unless it spills so
        # much that the one store of a bundle is the limit
        columns = 256 if chip.generation == 6 else LARGEST
        tiles = Tiles(block_q, block_kv, block_kv, columns=columns)
    else:
        if large:  # two gradients of 256 columns: as dq, on both sides
            block_q, block_kv = min(block_q, 512), min(block_kv, 512)
        # v4 fills fewer registers a bundle: fewer queries at a time spill less
        columns = 256 if chip.generation <= 4 and not large else LARGEST
        tiles = Tiles(block_q, block_kv, min(512, block_kv), columns=columns)
    return _fitting(tiles, problem, chip, 2)


def query_bytes(problem: Problem, rows: int) -> int:
    """Returns the vector memory that holds the gradient of ``rows`` queries of a key head's group.

    Bytes: a float32 accumulator, and both buffers of the result.
    """
    lanes = -(-problem.dim // LANES) * LANES
    return problem.group * rows * lanes * (4 + 2 * problem.itemsize)


def strip_bytes(block_q: int) -> int:
    """Returns the bytes of a float32 strip of ds, which the matmul of queries reads, too."""
    return 4 * STRIP * block_q


def fused_tiles(problem: Problem, chip: Chip) -> Tiles | None:
    """Tiles of the kernel of all gradients: outer keys, inner queries; None: two kernels run."""
    block_q, block_kv = _gradient_blocks(problem)
    gradient_bytes = query_bytes(problem, -(-problem.q_len // block_q) * block_q)
    if gradient_bytes > chip.vmem // 2:
        return None
    # a grid of one head leaves the second core of v4 and v5p idle, which dq and dkv do not
    if chip.mxu <= 128 and problem.batch * problem.kv_heads == 1:
        return None
    tiles = dkv_tiles(problem, chip)
    if tiles.transposed:  # keys lie along sublanes here
        tiles = replace(tiles, rows=min(256, block_kv), columns=min(512, block_q))
    left = chip.vmem - gradient_bytes - strip_bytes(block_q)
    return _fitting(tiles, problem, replace(chip, vmem=left), 2)


def override(tiles: Tiles, params: Any, fields: Mapping[str, str] = FIELDS) -> Tiles:
    """Returns ``tiles`` overridden by a config, in full registers of 128 lanes."""
    values = {name: config_field(params, field) for name, field in fields.items()}
    sizes = {name: max(LANES, int(size)) for name, size in values.items() if size is not None}
    return replace(tiles, **sizes)


def neighbours(tiles: Tiles) -> list[Tiles]:
    """Tiles one step away: half or twice the queries, half or twice the keys."""
    candidates = [
        replace(tiles, block_q=tiles.block_q // 2),
        replace(tiles, block_kv=tiles.block_kv // 2),
        replace(tiles, block_q=tiles.block_q * 2),
        replace(tiles, block_kv=tiles.block_kv * 2),
    ]
    return [
        t
        for t in candidates
        if LANES <= min(t.block_q, t.block_kv) and max(t.block_q, t.block_kv) <= LARGEST
    ]
