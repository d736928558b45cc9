"""Block sizes for the blockwise XLA passes.

On a CPU a step is two (backward: five) small matrix products per key/value head and a few passes
over the logits tile between them.

- XLA's CPU product uses one thread below about 2**22 multiply-adds and all of them above: at
  head_dim 64, a 256 x 256 tile ran at 100 GFLOP/s on two cores, 256 x 512 at 170, 512 x 512 at 187.
  So rows * block_kv * head_dim should reach 2**23.
- The tile is read and written about five times per step. Larger tiles than needed for the first
  rule leave the caches (1 MiB of L2 per core, 2 MiB per head at 512 x 1024) and waste work at the
  edge of a mask: a causal mask costs half a block per row more than it must.

512 keys and as many rows as reach 2**23 satisfy both. The query heads of one key/value head share
a product, so grouped heads need fewer query rows each.

On a GPU every step is a handful of kernel launches and round trips through memory, so the largest
tiles a config allows are best: on an H200, bf16 [2, 8192, 16, 128] causal, forward and backward
took 40 ms with 256 x 512 tiles, 30 with 512 x 512, 21 with 1024 x 1024.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.ops import Backend, BwdParams, FwdParams
from ejkernel.ops.utils.device import target_device
from ejkernel.types.attention import field

BLOCK_KV = 512
DOT_MULTIPLY_ADDS = 2**23
GPU_BLOCK = 1024


def _power_of_two(n: int) -> int:
    return 1 << max(0, (max(1, n) - 1).bit_length())


def default_blocks(groups: int, head_dim: int) -> tuple[int, int]:
    """(block_q, block_kv) by the rules above, powers of two in [64, 1024]."""
    if target_device().kind is Backend.GPU:
        return GPU_BLOCK, GPU_BLOCK
    rows = DOT_MULTIPLY_ADDS // (BLOCK_KV * max(head_dim, 1) * max(groups, 1))
    return min(512, max(64, _power_of_two(rows))), BLOCK_KV


def blocks(cfg: Any, name: str, groups: int, head_dim: int) -> tuple[int, int]:
    """Blocks of ``cfg.fwd_params`` or ``cfg.bwd_params``, defaults where it says nothing."""
    params = field(cfg, name)
    block_q, block_kv = default_blocks(groups, head_dim)
    return int(field(params, "q_blocksize", block_q)), int(field(params, "kv_blocksize", block_kv))


def heuristic(inv: Any) -> dict[str, Any]:
    """Config fields for a call; powers of two, as configs demand."""
    q, k = inv.arguments["query"], inv.arguments["key"]
    block_q, block_kv = default_blocks(q.shape[2] // max(k.shape[2], 1), q.shape[3])
    sizes = {"q_blocksize": block_q, "kv_blocksize": block_kv}
    return {"fwd_params": FwdParams(**sizes), "bwd_params": BwdParams(**sizes)}


def sample_inputs(inv: Any, rng: Any) -> tuple[tuple, dict[str, Any]]:
    """Packed calls: documents of equal length. Everything else is drawn by the caller."""
    a, given = inv.arguments, {}
    for name, array in (("cum_seqlens_q", "query"), ("cum_seqlens_k", "key")):
        if a.get(name) is not None:
            ends = np.linspace(0, a[array].shape[1], a[name].shape[0])
            given[name] = ends.astype(np.int32)
    return (), given
