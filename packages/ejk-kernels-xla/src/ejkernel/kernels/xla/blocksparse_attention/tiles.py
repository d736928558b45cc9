"""Tile sizes, and the number of heads to map together.

A tile should lie inside one block of the pattern, or hold full blocks: then nothing is computed
that the pattern leaves out. Blocks below 64 are joined, since smaller matmuls are mostly
overhead; blocks above 256 are cut where a divisor allows, so that a step's tiles stay in the
caches.

One matmul of 128 x 128 pairs at head_dim 64 is 2**20 multiply-adds, enough to hide the overhead
of a step on a CPU; heads with smaller tiles are mapped together, and on a GPU all heads are.
"""

from __future__ import annotations

from ejkernel.ops import Backend
from ejkernel.ops.utils.device import target_device
from ejkernel.types.arrays import is_symbolic

SMALLEST, LARGEST, PLAIN = 64, 256, 128
STEP_MULTIPLY_ADDS = 2**20


def tile_of(block: int, length: int) -> int:
    """The tile for an axis of ``length`` whose pattern has blocks of ``block``."""
    if not is_symbolic(length) and block >= length:
        return max(1, min(length, PLAIN))
    if block <= SMALLEST:
        return block * (SMALLEST // block)
    if block <= LARGEST:
        return block
    divisors = (n for n in range(LARGEST, SMALLEST - 1, -1) if block % n == 0)
    return next(divisors, PLAIN)


def heads_at_once(rows: int, columns: int, dim: int, all_heads: int) -> int:
    """Returns the number of heads whose tiles of ``rows`` x ``columns`` make one step."""
    if target_device().kind is Backend.GPU:
        return all_heads
    return max(1, -(-STEP_MULTIPLY_ADDS // max(1, rows * columns * dim)))
