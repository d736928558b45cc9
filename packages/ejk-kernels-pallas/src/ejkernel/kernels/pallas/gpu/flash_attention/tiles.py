"""Tiles of the Hopper kernels: arithmetic on the problem and the chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardTiles:
    """How the forward kernel cuts a problem.

    Attributes:
        consumers: warpgroups that compute, 64 query rows each.
        block_kv: keys of one step, a multiple of 64.
        stages, q_stages: buffers of k and v, and of q, in shared memory.
        turns: whether consumers take turns to issue products.
        o_columns: columns of o that are staged in shared memory at once.
        head_group: heads whose tiles are worked on together.
    """

    consumers: int = 2
    block_kv: int = 128
    stages: int = 2
    q_stages: int = 2
    turns: bool = True
    o_columns: int = 128
    head_group: int = 1

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def consumer_registers(self) -> int:
        """Registers a thread; a multiprocessor has 65536, the kernel starts with even shares."""
        return 160 if self.consumers == 3 else 232

    @property
    def producer_registers(self) -> int:
        return 32 if self.consumers == 3 else 40
