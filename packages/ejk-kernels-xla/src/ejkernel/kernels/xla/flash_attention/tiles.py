"""Block sizes for the blockwise XLA passes.

On a CPU a step is two (backward: five) small matrix products per key/value head and a few passes
over the logits tile between them.

- XLA's CPU matmul uses one thread below about 2**22 multiply-adds and all of them above: at
  head_dim 64, a 256 x 256 tile ran at 100 GFLOP/s on two cores, 256 x 512 at 170, 512 x 512 at 187.
  So rows * block_kv * head_dim should reach 2**23.
- The tile is read and written about five times per step. Larger tiles than needed for the first
  rule leave the caches (1 MiB of L2 per core, 2 MiB per head at 512 x 1024) and waste work at the
  edge of a mask: a causal mask costs half a block per row more than it must.

512 keys and as many rows as reach 2**23 satisfy both. The query heads of one key/value head share
a matmul, so grouped heads need fewer query rows each.

On a GPU every step is a handful of kernel launches and round trips through memory, so the largest
tiles a config allows are best: on an H200, bf16 [2, 8192, 16, 128] causal, forward and backward
took 40 ms with 256 x 512 tiles, 30 with 512 x 512, 21 with 1024 x 1024.
"""

from __future__ import annotations

from ejkernel.kernels.xla._common.tiles import Blocks, Passes
from ejkernel.ops import Backend
from ejkernel.ops.utils.device import target_device

BLOCK_KV = 512
DOT_MULTIPLY_ADDS = 2**23
GPU_BLOCK = 1024


def _power_of_two(n: int) -> int:
    return 1 << max(0, (max(1, n) - 1).bit_length())


def choose(groups: int, head_dim: int) -> Passes:
    """Blocks by the rules above, powers of two in [64, 1024]; the same in both passes."""
    blocks = Blocks(GPU_BLOCK, GPU_BLOCK)
    if target_device().kind is not Backend.GPU:
        rows = DOT_MULTIPLY_ADDS // (BLOCK_KV * max(head_dim, 1) * max(groups, 1))
        blocks = Blocks(min(512, max(64, _power_of_two(rows))), BLOCK_KV)
    return Passes(blocks, blocks)
