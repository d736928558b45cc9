"""Tile sizes for flash attention, with the reason for each choice."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton.common.dims import exact_dim, split_dim
from ejkernel.kernels.triton.flash_attention import single_row
from ejkernel.kernels.triton.kernel import override_tiles
from ejkernel.kernels.triton.serving.decode_tiles import DecodeTiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.params import config_field
from ejkernel.types.attention.problem import Problem


@dataclass(frozen=True)
class Tiles:
    """Tile of one kernel: its rows of queries and keys, and its launch options.

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


@dataclass(frozen=True)
class FlashTiles:
    """Tiles of the three passes: forward, query gradient, key gradients.

    ``decode``: the launch of decoding, where that is the forward pass.
    """

    fwd: Tiles
    dq: Tiles
    dkv: Tiles
    decode: DecodeTiles | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a config with these tiles."""
        fwd = {theirs: getattr(self.fwd, mine) for mine, theirs in FIELDS.items()}
        if self.decode is not None:
            fwd = {"kv_blocksize": self.decode.block, **self.decode.fields}
        bwd = {theirs: getattr(self.dkv, mine) for mine, theirs in FIELDS.items()}
        rows = {theirs: getattr(self.dq, mine) for mine, theirs in DQ_FIELDS.items()}
        return {"fwd_params": fwd, "bwd_params": rows | bwd}

    def apply_config(self, cfg: Any, problem: Problem, target: Target) -> FlashTiles:
        """Returns the tiles overridden by a config; ``q_blocksize`` selects the forward kernel."""
        fwd, bwd = config_field(cfg, "fwd_params"), config_field(cfg, "bwd_params")
        dq, dkv = override(self.dq, bwd, DQ_FIELDS), override(self.dkv, bwd)
        decode = self.decode
        if decode is None or config_field(fwd, "q_blocksize") is not None:
            tiles = override(self.fwd, fwd)
            keys = least_keys(problem)
            if problem.itemsize == 1 and tiles.block_kv < keys:
                raise ConfigError(
                    f"fwd_params: kv_blocksize={tiles.block_kv}: 8-bit matmuls take at least {keys}"
                )
            return FlashTiles(tiles, dq, dkv)
        return FlashTiles(self.fwd, dq, dkv, decode.apply_block_config(fwd))


def choose(problem: Problem, target: Target) -> FlashTiles:
    """Returns the tiles of a call by the heuristics below."""
    fwd, backward = forward_tiles(problem, target), backward_tiles(problem, target)
    return FlashTiles(fwd, *backward, single_row.choose(problem, target))


@functools.cache
def _padded(dim: int) -> int:
    return sum(split_dim(dim))


def can_use_tensor_maps(problem: Problem, target: Target) -> bool:
    """Returns whether tiles of keys and values can be read by TMA.

    Needs Hopper or newer, two-byte elements, head dims that are one or two powers of two (a box
    of columns must not reach into the next head) and rows of whole 16 bytes.
    """
    return (
        target.platform == "cuda"
        and int(target.arch) >= 90
        and target.tensor_maps
        and problem.itemsize == 2
        and exact_dim(problem.dim)
        and exact_dim(problem.value_dim)
        and min(problem.dim, problem.value_dim) >= 16
    )


def forward_tiles(problem: Problem, target: Target) -> Tiles:
    """Tiles of the forward kernel."""
    return _fit(_forward(problem, target), problem, target, streams_keys=True, resident=())


def backward_tiles(problem: Problem, target: Target) -> tuple[Tiles, Tiles]:
    """Tiles of the query gradient and of the key gradients, with the same warps and stages.

    In the first queries and output gradients stay resident and keys and values stream through; in
    the second the other way round. A config has one number of warps and of stages for both.
    """
    dq, dkv = _backward(problem, target)
    resident = (problem.dim, problem.value_dim)
    dq = _fit(dq, problem, target, streams_keys=True, resident=resident)
    dkv = _fit(dkv, problem, target, streams_keys=False, resident=resident)
    stages = min(dq.num_stages, dkv.num_stages)
    return replace(dq, num_stages=stages), replace(dkv, num_stages=stages)


def bias_tiles(dq: Tiles, target: Target) -> Tiles:
    """Returns the tiles of the bias gradient: the query gradient's, whose logits it recomputes."""
    # its accumulator is one more tile in registers, where MMAs with register operands leave less
    # room
    return dq if target.hopper else replace(dq, block_kv=max(16, dq.block_kv // 2))


def _forward(problem: Problem, target: Target) -> Tiles:
    dim = max(_padded(problem.dim), _padded(problem.value_dim))
    short = problem.q_len <= 64
    if problem.itemsize == 1:
        return _eight_bit(problem, target, dim, short)
    if problem.dtype == "float32":
        if problem.precision == "ieee":
            # no matrix instructions: 32 x 32 over 256 threads keep operands in registers
            return Tiles(32, 32, 8, 1)
        if target.hopper and dim <= 128 and not short:
            # without bias and dropout, on an H200, 1.9 times as fast as 64 x 32 at 64 columns and
            # 1.6 times at 128, with a bias 1.4 times. Four warps with a bias would spill 364 bytes
            if dim <= 64 and _is_plain(problem):
                return Tiles(128, 64, 4, 1)
            return Tiles(128, 64, 8, 2)
        # tf32 MMAs read operands from registers: a quarter of the tile fits
        return Tiles(64, 32, 4, 2 if dim <= 64 else 1)
    if target.platform == "rocm":
        # 64 KiB of shared memory, no asynchronous copies: one stage
        if problem.biased:
            # tiles of the bias are staged in addition to keys and values
            return Tiles(64, 64, 4, 1) if dim <= 128 else Tiles(64, 32, 8, 2)
        return Tiles(128 if dim <= 128 else 64, 64 if dim <= 128 else 32, 4, 1)
    if problem.biased:
        if target.hopper and dim <= 64:
            # three programs as without a bias: on an H200 1.15 times as fast as 32 keys
            return Tiles(64, 64, 4, 3)
        if target.hopper and dim <= 128:
            # programs overlap as below; with tiles of the bias three stages fit of 32 keys
            return Tiles(64, 32, 4, 3)
        # tiles of the bias are staged in shared memory next to keys and values, and take registers
        # next to the logits
        return Tiles(64, 64 if dim <= 128 else 32, 8, 2)
    if target.hopper:
        if dim <= 128:
            # one warp group of 64 rows waits for its own MMAs before its exponentials, so
            # programs must overlap instead: three stages of 64 x 128 keys and values take 112 KiB
            # (of 64 columns 56 KiB), which leaves room for two (three) programs a multiprocessor:
            # barriers are 56 to 1,024 bytes too many for a fourth. Two stages have room for it;
            # on an H200 that is 4% slower if causal and 4% faster if not
            return Tiles(64, 64, 4, 3)
        # the accumulator alone is 64 KiB a warp group: fewer keys at a time, fewer still where
        # the addresses of pointers take registers
        keys = 64 if can_use_tensor_maps(problem, target) else 32
        return Tiles(64, keys, 4, 2) if short else Tiles(128, keys, 8, 2)
    if dim <= 64:
        # queries stay in registers as operands: 128 rows take the threads of eight warps
        return Tiles(64, 64, 4, 3) if short else Tiles(128, 64, 8, 3)
    if dim <= 128:
        # a scale for each key takes registers
        scaled = problem.scale_blocks is not None and problem.scale_blocks[1] > 1
        return Tiles(64, 64, 4, 2) if short else Tiles(128, 32 if scaled else 64, 8, 3)
    return Tiles(64, 64, 8, 2)


def _eight_bit(problem: Problem, target: Target, dim: int, short: bool) -> Tiles:
    """Returns tiles of 8-bit operands: half the bytes, and matmuls that sum over 32 keys."""
    if problem.biased or dim > 128:
        return Tiles(64, 64, 4 if dim <= 128 else 8, 2)
    if target.hopper:
        # logits and accumulators of 64 rows fill a warp group's registers as in 16 bits
        return Tiles(64 if short else 128, 64, 4 if short else 8, 3)
    return Tiles(64, 64, 4, 3) if short else Tiles(128, 64, 8, 3)


def partial_stages(problem: Problem, tiles: Tiles, target: Target) -> int | None:
    """Returns the stages of the forward kernel's masked blocks with segments or positions.

    None: the stages of the tiles. Segments or positions of keys are staged too: in addition to
    three stages of 64 x 128 keys and values they would leave room for one program a multiprocessor,
    by 56 bytes.
    """
    wide = max(_padded(problem.dim), _padded(problem.value_dim)) == 128
    return 2 if target.hopper and wide and tiles.num_stages == 3 else None


def _backward(problem: Problem, target: Target) -> tuple[Tiles, Tiles]:
    dim = max(_padded(problem.dim), _padded(problem.value_dim))
    if problem.dtype == "float32":
        if problem.precision == "ieee":
            # two kinds of operands: a quarter of the forward tile. With a second stage the
            # operands of NVIDIA's MMAs stay in shared memory, not in registers
            tile = Tiles(16, 16, 8, 1 if target.platform == "rocm" else 2)
            return tile, tile
        if target.hopper and dim <= 128 and _is_plain(problem):
            if dim <= 64:  # on an H200, forward and backward, 1.6 times as fast as 32 x 32
                return Tiles(128, 64, 8, 1), Tiles(64, 128, 8, 1)
            # 1.2 times; more keys or rows spill
            return Tiles(64, 32, 4, 1), Tiles(32 if _is_split(problem) else 64, 32, 4, 1)
        return Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)
    if target.platform == "rocm":
        # one stage as forward; wide heads have registers for half the keys
        return Tiles(64, 32, 4, 1), Tiles(32, 64 if dim <= 128 else 32, 4, 1)
    if target.hopper:
        return _hopper_backward(problem, target, dim)
    if problem.biased:
        # the bias takes the place of a second stage
        rows = 64 if dim <= 128 else 32
        return Tiles(64, rows, 8, 1), Tiles(64, rows, 8, 1)
    if dim <= 64:
        # 50 KiB each: a third stage is room that two programs a multiprocessor leave on sm_80
        return Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3)
    if dim <= 128:
        # two accumulators of 64 x 128: eight warps. A dim split into two powers of two has the
        # addresses of both: half the rows a time
        return Tiles(64, 64, 8, 2), Tiles(32 if _is_split(problem) else 64, 64, 8, 2)
    if problem.dim == problem.value_dim:
        return Tiles(64, 32, 8, 1), Tiles(32, 64, 8, 1)
    # one of them is two powers of two, whose addresses take the registers of half the rows
    return Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)


def _is_plain(problem: Problem) -> bool:
    """Returns whether neither a bias nor a dropout mask takes registers."""
    return not problem.biased and problem.dropout == 0.0


def _is_split(problem: Problem) -> bool:
    """Returns whether q and k, or v, are read as two powers of two of columns."""
    return any(split_dim(dim)[1] for dim in (problem.dim, problem.value_dim))


def _hopper_backward(problem: Problem, target: Target, dim: int) -> tuple[Tiles, Tiles]:
    maps = can_use_tensor_maps(problem, target)
    if dim > 128:
        if problem.biased:
            # the bias takes registers next to logits and accumulators: half the tile
            return Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)
        # dq: one accumulator of 128 x 256 fills half the registers; 128 KiB of queries and output
        # gradients leave room for two stages of 32 keys. dkv: one accumulator at a time (see
        # ``key_passes``), 128 x 256 is 128 registers a thread; 128 KiB of keys and values leave
        # room for two stages of 32 rows
        return Tiles(128, 32, 8, 2), Tiles(32, 128, 8, 2)
    # registers next to the logits go to pointer addresses, a bias, the slope of a
    # cap or a score_mod, a dropout mask.
    # Two of them take half the rows at a time. A slope or a mask alone spills a few bytes of 64
    # rows at 128 columns, and measured faster than 32 rows, which spill nothing: 454 to 391 TFLOP/s
    # (cap), 417 to 320 (dropout)
    extras = (problem.soft_cap is not None) + (problem.dropout > 0.0)
    extras += problem.score_mod is not None
    rows = 32 if (extras + problem.biased > 1 and dim > 64) or not maps else 64
    if dim <= 64:
        # 64 KiB: three programs a multiprocessor, one exponentiates while others multiply; that
        # leaves a thread 168 registers. By default the compiler takes a few more, which leave
        # two programs: 368 TFLOP/s, not 441. A bias leaves two; its third stage saves an eighth
        registers = None if extras or problem.biased else 168
        return Tiles(64, 64, 4, 3), Tiles(rows, 64, 4, 3, registers)
    # 96 KiB: two programs; a third stage would leave one. Two accumulators of 64 x 128 are 128
    # registers a thread
    return Tiles(64, 64, 4, 2), Tiles(rows, 64, 4, 2)


def _fit(
    tiles: Tiles, problem: Problem, target: Target, *, streams_keys: bool, resident: tuple[int, ...]
) -> Tiles:
    """Shrinks ``tiles`` until their shared memory fits the target, or to the smallest tiles.

    Streamed rows beyond 32 go first, then stages: copies still run ahead of the MMAs.
    """
    while _shared(tiles, problem, target, streams_keys, resident) > target.shared_limit:
        streamed, other = ("block_kv", "block_q") if streams_keys else ("block_q", "block_kv")
        rows = getattr(tiles, streamed)
        if rows > 32:
            tiles = replace(tiles, **{streamed: rows // 2})
        elif tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif rows > 16:
            tiles = replace(tiles, **{streamed: rows // 2})
        elif getattr(tiles, other) > 16:
            tiles = replace(tiles, **{other: getattr(tiles, other) // 2})
        else:
            break
        tiles = replace(tiles, registers=None)
    return tiles


def _shared(
    tiles: Tiles, problem: Problem, target: Target, streams_keys: bool, resident: tuple[int, ...]
) -> int:
    """Returns a bound of the shared-memory bytes; ``resident``: head dims of resident operands."""
    dims = _padded(problem.dim), _padded(problem.value_dim)
    rows, streamed = tiles.block_q, tiles.block_kv
    if not streams_keys:
        rows, streamed = streamed, rows
    size, stages = problem.itemsize, tiles.num_stages
    total = stages * streamed * sum(dims) * size
    if stages == 1:
        total += streamed * max(dims) * size * bool(resident)  # read in two layouts
    if target.platform == "cuda":  # elsewhere resident operands are in registers
        total += rows * sum(map(_padded, resident)) * size
    # probabilities between two matmuls; a dense mask and a bias of four bytes are staged
    return total + rows * streamed * (size + stages * (1 + 4 * problem.biased))


def key_passes(
    problem: Problem, tiles: Tiles, target: Target
) -> tuple[tuple[tuple[str, ...], Tiles], ...]:
    """Returns the key gradients that each launch computes, and its tiles.

    One launch for both takes four matmuls a tile, separate launches two (dv) and three (dk). They
    are faster where both accumulators would take more than half of the 255 registers a thread has.
    """
    columns = _padded(problem.dim) + _padded(problem.value_dim)
    threads = target.warp_size * tiles.num_warps
    if not target.hopper or tiles.block_kv * columns <= 128 * threads:
        return ((("dk", "dv"), tiles),)
    # dv needs no values: room for twice the rows a stage, where their addresses leave registers
    double = problem.itemsize == 2 and can_use_tensor_maps(problem, target)
    rows = min(64, 2 * tiles.block_q) if double else tiles.block_q
    wide = replace(tiles, block_q=rows)
    wide = _fit(wide, problem, target, streams_keys=False, resident=(problem.dim,))
    return (("dk",), tiles), (("dv",), wide)


FIELDS = {
    "block_q": "q_blocksize",
    "block_kv": "kv_blocksize",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
# the key gradients use the names of FIELDS; both passes share warps and stages
DQ_FIELDS = FIELDS | {"block_q": "blocksize_m", "block_kv": "blocksize_n"}


def least_keys(problem: Problem) -> int:
    """Returns the keys that matmuls sum over at least."""
    return 32 if problem.itemsize == 1 else 16


def override(tiles: Tiles, params: Any, fields: Mapping[str, str] = FIELDS) -> Tiles:
    """Returns ``tiles`` overridden by ``fwd_params`` or ``bwd_params`` of a config."""
    new = override_tiles(tiles, params, fields)
    # a bound on registers was chosen for these sizes only
    return tiles if new == tiles else replace(new, registers=None)


def pass_neighbours(tiles: Tiles, problem: Problem) -> list[Tiles]:
    """Returns tiles one step away: keys halved or doubled, rows and warps halved, a stage more."""
    candidates = [
        replace(tiles, block_kv=tiles.block_kv // 2),
        replace(tiles, block_q=tiles.block_q // 2, num_warps=max(4, tiles.num_warps // 2)),
        replace(tiles, num_stages=tiles.num_stages + 1),
        replace(tiles, block_kv=tiles.block_kv * 2),
    ]
    keys = least_keys(problem)
    return [t for t in candidates if t.block_q >= 16 and keys <= t.block_kv <= 256]
