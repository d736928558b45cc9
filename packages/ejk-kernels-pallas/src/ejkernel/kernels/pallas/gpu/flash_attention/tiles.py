"""Tiles of the Hopper kernels: arithmetic on the problem and the chip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.pallas.gpu.common.chip import Chip
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import BackwardTiles
from ejkernel.types.attention import field
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Rules

REGISTERS = 65536  # of a multiprocessor
ROWS = 64  # of one warpgroup's product
BARRIERS = 512  # bytes kept for barriers and alignment


@dataclass(frozen=True)
class ForwardTiles:
    """How the forward kernel cuts a problem.

    Attributes:
        consumers: warpgroups that compute, 64 query rows each.
        block_kv: keys of one step, a multiple of 64.
        stages, q_stages: buffers of k and v, and of q, in shared memory.
        turns: whether consumers take turns to issue products.
        hand_over: keys of the second product after which the turn passes; 0 = all.
        o_columns: columns of o that are staged in shared memory at once.
        head_group: heads whose tiles are worked on together.
        slack: powers of two by which a row's maximum may grow before what was summed is scaled
            anew; 0 scales at every step.
    """

    consumers: int = 2
    block_kv: int = 128
    stages: int = 2
    q_stages: int = 2
    turns: bool = True
    hand_over: int = 0
    o_columns: int = 64
    head_group: int = 1
    slack: int = 8

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    @property
    def consumer_registers(self) -> int:
        """Of a thread, a multiple of 8; the producer leaves most of its share."""
        return 160 if self.consumers == 3 else 232

    @property
    def producer_registers(self) -> int:
        return (
            REGISTERS // 128
            - self.consumers * self.consumer_registers
            - (0 if self.consumers == 3 else 8)
        )

    def shared(self, problem: Problem) -> int:
        """Bytes of shared memory."""
        d, dv, size = problem.dim, problem.value_dim, problem.itemsize
        q = self.q_stages * self.block_q * d * size
        kv = self.stages * self.block_kv * (d + dv) * size
        o = self.block_q * (self.o_columns * size + 4)
        return q + kv + o + BARRIERS


def forward_tiles(problem: Problem, rules: Rules, chip: Chip) -> ForwardTiles:
    """The tiles that the arithmetic below gives."""
    widest = max(problem.dim, problem.value_dim)
    whole = rules.band.empty and not rules.arrays
    if widest <= 64:
        # o, s and p take 128 registers a thread at 128 keys: three consumers of 160 fit, share k
        # and v, and find enough to do without taking turns
        tiles = ForwardTiles(consumers=3, turns=False)
    elif widest <= 128:
        # o, s and p take 160 registers at 128 keys: two consumers of 232. Masked tiles differ
        # too much from step to step for turns to pay
        tiles = ForwardTiles(hand_over=64) if whole else ForwardTiles(turns=False)
    else:
        # o alone takes 128 registers: half as many keys a step; with so few exponentials a
        # product the consumers fall into step by themselves
        tiles = ForwardTiles(block_kv=64, turns=False)
    if widest > 128 and problem.value_dim <= 128:
        tiles = replace(tiles, block_kv=128)
    if tiles.shared(problem) > chip.shared:
        tiles = replace(tiles, q_stages=1)
    if tiles.shared(problem) > chip.shared:
        tiles = replace(tiles, block_kv=64, hand_over=0)
    if rules.arrays or rules.band.lo is not None:
        # short tiles: o leaves in one piece, so that their ends wait for no copy
        whole_o = replace(tiles, o_columns=problem.value_dim)
        tiles = whole_o if whole_o.shared(problem) <= chip.shared else tiles
    return replace(tiles, head_group=head_group(problem, whole and widest > 64, chip))


def head_group(problem: Problem, alike: bool, chip: Chip) -> int:
    """Heads to work on together.

    Where tiles differ in length, several heads at once let short tiles fill the ends of long
    ones; their keys and values should fit a third of the near L2, the rest is in flight. Tiles
    ``alike`` need none: one key head at a time is read from L2 most often.
    """
    if alike:
        return problem.group
    bytes_a_head = problem.kv_len * (problem.dim + problem.value_dim) * problem.itemsize
    return problem.group * max(1, chip.cache // 3 // max(bytes_a_head, 1))


def override_forward(tiles: ForwardTiles, params: Any) -> ForwardTiles:
    """What a config's ``fwd_params`` say instead: q_blocksize (128), kv_blocksize, num_stages."""
    block_q, block_kv = field(params, "q_blocksize"), field(params, "kv_blocksize")
    stages = field(params, "num_stages")
    if block_q is not None:
        tiles = replace(tiles, consumers=2)  # three are no power of two; one leaves half idle
    if block_kv is not None and block_kv != tiles.block_kv:
        block_kv = max(block_kv // ROWS, 1) * ROWS
        tiles = replace(tiles, block_kv=block_kv, hand_over=min(tiles.hand_over, block_kv // 2))
    return tiles if stages is None else replace(tiles, stages=max(stages, 2))


def override_backward(tiles: BackwardTiles, problem: Problem, params: Any) -> BackwardTiles:
    """What a config's ``bwd_params`` say instead: the same fields.

    Wide heads fill shared memory with the one form there is: they keep their tiles.
    """
    if max(problem.dim, problem.value_dim) > 128:
        return tiles
    given = {
        "block_q": field(params, "q_blocksize"),
        "block_kv": field(params, "kv_blocksize"),
        "stages": field(params, "num_stages"),
    }
    return replace(tiles, **{name: value for name, value in given.items() if value is not None})
