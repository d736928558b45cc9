"""Block-sparse attention in Triton as one kernel object: flash attention over lists of tiles."""

from __future__ import annotations

from dataclasses import replace

from ejkernel.kernels.triton.flash_attention import tiles
from ejkernel.kernels.triton.flash_attention.implementation import FlashAttention
from ejkernel.kernels.triton.flash_attention.tiles import FlashTiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.types import calls
from ejkernel.types.problem import Problem

LEAST = 32  # rows or keys of a tile: fewer make products of matrix instructions too short


class BlockSparseAttention(FlashAttention):
    """Attention over the blocks that a pattern allows, on a GPU; see the operation of this name.

    The kernels are those of flash attention; they walk lists of the tiles that the pattern and the
    mask leave, which are made on the device. ``cfg`` as there. Best where the blocks of the pattern
    are multiples of the tiles: a tile that covers several blocks is computed if one of them is
    seen.

    Source: Dao et al. 2022, FlashAttention (arXiv 2205.14135), section 3.3.
    """

    call = calls.BlockSparseAttention

    def choose(self, problem: Problem, target: Target) -> FlashTiles:
        chosen = tiles.choose(problem, target)
        if problem.pattern_blocks is None:
            return chosen
        q, kv = (max(LEAST, 1 << (n.bit_length() - 1)) for n in problem.pattern_blocks)
        fwd, dq = (replace(t, block_kv=min(t.block_kv, kv)) for t in (chosen.fwd, chosen.dq))
        return FlashTiles(fwd, dq, replace(chosen.dkv, block_q=min(chosen.dkv.block_q, q)))


blocksparse_attention = BlockSparseAttention()
