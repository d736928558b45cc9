"""Tiles of the Hopper kernels: arithmetic on the problem and the chip."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.pallas.gpu.common.chip import BARRIERS, Chip
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import BackwardTiles, backward_tiles
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.params import config_field
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.structure import Rules

REGISTERS = 65536  # of a multiprocessor
ROWS = 64  # of one warpgroup's matmul
ARRAY = 1024  # bytes: where an array of shared memory begins is a multiple
# Tiles that are no powers of two: three warpgroups, and 160 keys for pairs of programs
UNEVEN = ((192, 64), (192, 96), (192, 128), (128, 160))
OF_8_BITS = {64: ((192, 128),), 128: ((192, 96), (128, 192))}  # by head dim, operands of 8 bits


@dataclass(frozen=True)
class ForwardTiles:
    """Tile sizes of the forward kernel.

    Attributes:
        block_q: query rows of a tile, 64 for each warpgroup that computes.
        block_kv: keys of one step, a multiple of 32.
        stages, q_stages: buffers of k and v, and of q, in shared memory.
        q_held: columns of q that consumers keep in registers, a multiple of 64; the others are
            read from shared memory for every matmul.
        cluster: programs that take neighbouring query blocks of a head together and share the
            copies of k and v; more than 1 only if all tiles visit the same keys.
        o_columns: columns of o that are staged in shared memory at once.
        head_group: heads whose tiles are worked on together, where lengths are known.
        slack: powers of two by which a row's maximum may grow before the accumulators are
            rescaled; 0 rescales at every step.
        lane_maxima: whether the four lanes of a row compare their maxima only where one of them
            saw more than ``slack`` allows.
        unshifted_first: whether tiles are computed without maxima first, and again with them only
            where that was not exact (see ``computes_unshifted``).
        isolates_steps: whether the softmax of a step without maxima and masks is a basic block of
            its own, behind a branch that is never taken (see ``softmax``).
        flag_per_tile: whether no tiles share the flag that they are to be computed again,
            however many there are: then its bits depend on no other tile.
        guided: whether a multiprocessor runs several programs one after the other, with less and
            less work (guided self-scheduling): then a kernel that holds some multiprocessors, or
            waits for them, delays the others little. Only where lengths are known before the
            launch.
        registers: of a consumer thread, a multiple of 8; 0: as many as leave the producer the
            least.
    """

    block_q: int = 128
    block_kv: int = 128
    stages: int = 2
    q_stages: int = 2
    q_held: int = 0
    cluster: int = 1
    o_columns: int = 64
    head_group: int = 1
    slack: int = 8
    lane_maxima: bool = False
    unshifted_first: bool = False
    isolates_steps: bool = False
    flag_per_tile: bool = False
    guided: bool = False
    registers: int = 0

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.block_q // ROWS

    @property
    def swizzle(self) -> int:
        """Bytes of a row of shared memory's pattern; the keys of a matmul are full rows of it."""
        return 128 if self.block_kv % 64 == 0 else 64

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread, a multiple of 8; the producer gives up most of its."""
        return self.registers or (160 if self.consumers == 3 else 240)

    @property
    def producer_registers(self) -> int:
        groups = self.consumers + 1
        start = REGISTERS // (128 * groups) // 8 * 8  # of every thread, before any gives
        return groups * start - self.consumers * self.consumer_registers

    def shared(self, problem: Problem) -> int:
        """Bytes of shared memory."""
        d, dv, size = problem.dim, problem.value_dim, problem.itemsize
        q = self.q_stages * self.block_q * d * size
        kv = self.stages * self.block_kv * (d + dv) * size
        o = self.block_q * self.o_columns * max(size, 2)
        rows, flags = self.block_q * 2 * 4, ARRAY  # lse and base; tiles to compute again
        return sum(-(-x // ARRAY) * ARRAY for x in (q, kv, o, rows, flags)) + BARRIERS


@dataclass(frozen=True)
class FlashTiles:
    """Tiles of both passes."""

    fwd: ForwardTiles
    bwd: BackwardTiles

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a config."""
        fwd = {
            "q_blocksize": self.fwd.block_q,
            "kv_blocksize": self.fwd.block_kv,
            "num_stages": self.fwd.stages,
        }
        if (self.fwd.block_q, self.fwd.block_kv) in (
            *UNEVEN,
            *itertools.chain(*OF_8_BITS.values()),
        ):
            fwd["warpgroups"] = self.fwd.consumers
        return {
            "fwd_params": fwd,
            "bwd_params": {
                "q_blocksize": self.bwd.block_q,
                "kv_blocksize": self.bwd.block_kv,
                "num_stages": self.bwd.stages,
            },
        }

    def apply_config(self, cfg: Any, problem: Problem, chip: Chip) -> FlashTiles:
        """Returns these tiles, overridden by a config."""
        return FlashTiles(
            override_forward(self.fwd, problem, chip, config_field(cfg, "fwd_params")),
            override_backward(self.bwd, problem, chip, config_field(cfg, "bwd_params")),
        )


def choose(problem: Problem, target: Chip) -> FlashTiles:
    """The tiles of a call by the arithmetic below."""
    return FlashTiles(forward_tiles(problem, problem.rules, target), backward_tiles(problem))


def forward_tiles(problem: Problem, rules: Rules, chip: Chip) -> ForwardTiles:
    """The tiles that the arithmetic below gives."""
    widest = max(problem.dim, problem.value_dim)
    pattern = problem.pattern_blocks
    is_dense = rules.band.empty and not rules.arrays and pattern is None
    unshifted = computes_unshifted(problem, rules)
    if problem.itemsize == 1:
        tiles = _eight_bit(widest)
    elif widest <= 64:
        # o, s and p take 128 registers a thread at 128 keys: three consumers of 160 fit and share
        # k and v
        tiles = ForwardTiles(block_q=192, stages=3 if unshifted else 2)
    elif widest < 128 and unshifted and _has_long_tiles(rules):
        # three consumers have registers for 96 keys. One H200, 4k, full: heads of 80 1.173 -> 0.982
        # ms, of 96 1.030 -> 0.904; causal of 80 0.634 -> 0.577
        tiles = ForwardTiles(block_q=192, block_kv=96, stages=3)
    elif widest < 128:
        tiles = ForwardTiles()  # q in registers and pairs of programs are for heads of 128
    elif widest <= 128 and unshifted and _has_long_tiles(rules):
        tiles = ForwardTiles()  # without maxima, steps of 160 keys and copies by pairs gain nothing
    elif widest <= 128:
        tiles = _of_128(problem, is_dense)
    elif problem.value_dim <= 128:
        # o takes 64 registers: as many keys as above, q from shared memory
        tiles = ForwardTiles()
    else:
        # o alone takes 128 registers: half as many keys a step. Half of q also fits where
        # neither masks nor a cap's constants need registers
        simple = problem.soft_cap is None and _has_long_tiles(rules) and pattern is None
        hold_q = simple and (is_dense or problem.q_len % 128 == problem.kv_len % 64 == 0)
        tiles = ForwardTiles(block_kv=64, q_held=128 if hold_q else 0)
    if pattern is not None:
        # tiles inside a block, or with the fewest keys that matmuls take
        tiles = replace(tiles, block_q=128)
        if pattern[1] % 128 and pattern[1] < problem.kv_len:
            tiles = replace(tiles, block_kv=64)
    if tiles.shared(problem) > chip.shared:
        tiles = replace(tiles, q_stages=1)
    if tiles.shared(problem) > chip.shared:
        tiles = replace(tiles, block_kv=64)
    if not _has_long_tiles(rules) or pattern is not None:
        # short tiles: o is stored at once, so that their epilogue waits for no copy
        full_o = replace(tiles, o_columns=problem.value_dim)
        tiles = full_o if full_o.shared(problem) <= chip.shared else tiles
    if problem.value_dim % tiles.o_columns:
        tiles = replace(tiles, o_columns=problem.value_dim)
    tiles = replace(tiles, lane_maxima=True)
    # forward on an H200: heads of 64 at 16k and 4k 4.74 -> 3.85 and 1.26 -> 1.05 ms; of 128 at 4k
    # 0.893 -> 0.850, but 3.15 -> 3.26 at 16k
    isolates = widest <= 64 or (widest <= 128 and problem.kv_len <= 4096)
    tiles = replace(tiles, unshifted_first=unshifted, isolates_steps=unshifted and isolates)
    return replace(tiles, head_group=_head_group(problem, is_dense, chip))


def _eight_bit(widest: int) -> ForwardTiles:
    """Returns tiles of 8-bit operands: p takes half the registers.

    Their matmuls take half the time, so that at heads of 128 two warpgroups wait for each other
    more than half of it. Three fit with 96 keys a step. Causal at 16k on an H200 810 -> 853
    TFLOP/s, full 821 -> 860.
    """
    if widest <= 64:
        return ForwardTiles(block_q=192, stages=3, slack=3)
    if widest <= 128:
        return ForwardTiles(block_q=192, block_kv=96, slack=3)
    return ForwardTiles(slack=3)


def computes_unshifted(problem: Problem, rules: Rules) -> bool:
    """Returns whether tiles are computed without the maxima of their rows first.

    exp2 of a logit in [-100, 100] is accurate as it is, in float32 and in bfloat16, and most logits
    are there. Without maxima a step has a seventh fewer instructions, and waits for no exchange of
    a row. A tile in which a row's sum is out of ``RANGE``, or an output not finite, is computed
    again with maxima: so is one with a row that sees nothing, whose sum is 0. Windows and segments
    leave maxima out for heads of up to 128, for which they were measured.
    """
    p, band = problem, rules.band
    if p.soft_cap is not None or p.dtype != "bfloat16" or p.pattern_blocks:
        return False
    if band.hi is not None and band.hi < 0:  # the first rows of every head see nothing
        return False
    if rules.arrays and (rules.chunk or not set(rules.names) <= {"q_ids", "kv_ids"}):
        return False
    return _has_long_tiles(rules) or max(p.dim, p.value_dim) <= 128


def _has_long_tiles(rules: Rules) -> bool:
    """Returns whether tiles are as long as a causal mask leaves them: no windows, no segments."""
    return rules.band.lo is None and not rules.arrays


def _of_128(problem: Problem, is_dense: bool) -> ForwardTiles:
    """Returns tiles of heads of 128, where reads of shared memory or power are the limit.

    o takes 64 registers, s and p 96 at 128 keys: 32 of 240 are left for q, which matmuls then do
    not read. Without masks 160 keys in their place read as little more, step less often, and
    two programs may copy k and v for each other, which saves half of the reads of L2.
    """
    blocks = -(-problem.q_len // 128)
    padded = {keys: -(-problem.kv_len // keys) * keys for keys in (128, 160)}
    # keys past the end are computed too: 160 a step must save more than that. Programs without
    # a partner compute rows past the end
    if is_dense and padded[160] <= 1.05 * padded[128] and (blocks % 2 == 0 or blocks > 16):
        return _paired(ForwardTiles())
    return _alone(problem, ForwardTiles())


def _paired(tiles: ForwardTiles) -> ForwardTiles:
    """160 keys a step, for two programs that copy k and v for each other."""
    tiles = replace(tiles, unshifted_first=False)
    return replace(tiles, block_kv=160, q_stages=1, q_held=0, cluster=2)


def _alone(problem: Problem, tiles: ForwardTiles) -> ForwardTiles:
    """Tiles of heads of 128 for programs without a partner: q takes the place of more keys."""
    if problem.itemsize == 1:
        return replace(tiles, cluster=1)
    # a cap that follows maxima has constants in the registers of q
    q_held = 128 if problem.soft_cap is None else 0
    return replace(tiles, cluster=1, q_stages=2, q_held=q_held)


def _head_group(problem: Problem, is_dense: bool, chip: Chip) -> int:
    """Heads to work on together.

    Tiles alike need none: one key head at a time is read from L2 most often. Where tiles differ in
    length, several heads at once let short tiles fill the ends of long ones; their keys and values
    should fit a third of the near L2, the rest is in flight.
    """
    if is_dense and max(problem.dim, problem.value_dim) > 64:
        return problem.group
    bytes_a_head = problem.kv_len * (problem.dim + problem.value_dim) * problem.itemsize
    return problem.group * max(1, chip.cache // 3 // max(bytes_a_head, 1))


def override_forward(
    tiles: ForwardTiles, problem: Problem, chip: Chip, params: Any
) -> ForwardTiles:
    """Overrides tiles by ``fwd_params`` of a config: q_blocksize (128), kv_blocksize, num_stages.

    With ``warpgroups`` they are tiles of UNEVEN, which run as they are given.

    Raises:
        ConfigError: the tiles do not fit shared memory, or their warpgroups not the call.
    """
    block_q, block_kv = config_field(params, "q_blocksize"), config_field(params, "kv_blocksize")
    stages = config_field(params, "num_stages")
    if config_field(params, "warpgroups") is not None:
        tiles = _uneven(tiles, problem, params)
    else:
        if block_q is not None:
            tiles = replace(tiles, block_q=128)  # one warpgroup leaves half idle
        if block_kv is not None and block_kv != tiles.block_kv:
            if tiles.cluster > 1:  # pairs pay with 160 keys only
                tiles = _alone(problem, tiles)
            tiles = replace(tiles, block_kv=max(block_kv // ROWS, 1) * ROWS)
        if tiles.block_kv > (192 if max(problem.dim, problem.value_dim) <= 64 else 96):
            # a third warpgroup has too few registers for these logits
            tiles = replace(tiles, block_q=128)
    if tiles.block_kv > 128 and problem.pattern_blocks is not None:
        raise ConfigError(
            f"fwd_params: kv_blocksize={block_kv!r}: a pattern of blocks is visited in tiles "
            "of 64 or 128 keys"
        )
    if stages is not None:
        tiles = replace(tiles, stages=max(stages, 2))
    text = f"kv_blocksize={tiles.block_kv}, num_stages={tiles.stages}"
    _check_fits(f"fwd_params: {text}", tiles.shared(problem), chip)
    return tiles


def _uneven(tiles: ForwardTiles, problem: Problem, params: Any) -> ForwardTiles:
    """The tiles of a config that gives ``warpgroups``, for the calls that have them."""
    groups = config_field(params, "warpgroups")
    block_q, block_kv = config_field(params, "q_blocksize"), config_field(params, "kv_blocksize")
    text = f"fwd_params: q_blocksize={block_q}, kv_blocksize={block_kv}, warpgroups={groups}"
    kinds = UNEVEN
    if problem.itemsize == 1:
        kinds = OF_8_BITS.get(problem.dim, ())
    if (block_q, block_kv) not in kinds or block_q != ROWS * groups:
        allowed = ", ".join(f"{q} x {kv} of {q // ROWS}" for q, kv in kinds) or "none of them"
        raise ConfigError(f"{text}: the Hopper kernel has {allowed}")
    if config_field(params, "num_stages") == 1:
        raise ConfigError(f"{text}, num_stages=1: at least 2")
    if problem.itemsize == 1:
        return replace(tiles, block_q=block_q, block_kv=block_kv)
    if block_q == 192:
        widest = max(problem.dim, problem.value_dim)
        if (widest <= 64) == (block_kv == 96) or widest >= 128:
            raise ConfigError(
                f"{text}: three warpgroups are for heads of 64, with 96 keys for heads of 80 and 96"
            )
        return replace(tiles, block_q=block_q, block_kv=block_kv)
    is_dense = problem.rules.band.empty and not problem.rules.arrays
    if not is_dense or (problem.dim, problem.value_dim) != (128, 128):
        raise ConfigError(f"{text}: 160 keys are for heads of 128 without masks")
    return tiles if tiles.block_kv == block_kv else _paired(tiles)


def override_backward(
    tiles: BackwardTiles, problem: Problem, chip: Chip, params: Any
) -> BackwardTiles:
    """Overrides tiles by ``bwd_params`` of a config: num_stages.

    Block sizes have one form for each head dim. Wide heads fill shared memory with theirs: they
    keep their tiles.

    Raises:
        ConfigError: other block sizes, or the tiles do not fit shared memory.
    """
    if max(problem.dim, problem.value_dim) > 128:
        return tiles
    for name, only in (("q_blocksize", tiles.block_q), ("kv_blocksize", tiles.block_kv)):
        value = config_field(params, name)
        if value not in (None, only):
            raise ConfigError(
                f"bwd_params: {name}={value!r}: the Hopper kernel for heads of {problem.dim} "
                f"takes {only} only"
            )
    stages = config_field(params, "num_stages")
    if stages is not None:
        tiles = replace(tiles, stages=stages)
    _check_fits(f"bwd_params: num_stages={tiles.stages}", tiles.shared(problem), chip)
    return tiles


def _check_fits(text: str, need: int, chip: Chip) -> None:
    if need > chip.shared:
        raise ConfigError(f"{text}: {need} bytes of shared memory, a program has {chip.shared}")
