"""Block-sparse attention in Triton as one kernel object: flash attention over lists of tiles."""

from __future__ import annotations

from dataclasses import replace

from ejkernel.kernels.triton.flash_attention import tiles
from ejkernel.kernels.triton.flash_attention.implementation import FlashAttention
from ejkernel.kernels.triton.flash_attention.tiles import FlashTiles, Tiles
from ejkernel.kernels.triton.targets import Target
from ejkernel.types import calls
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import arguments

# rows of a tile: fewer make MMAs too short, or leave warps without work
LEAST_STREAMED, LEAST_RESIDENT = 32, 64


class BlockSparseAttention(FlashAttention):
    """Attention over the blocks that a pattern allows, on a GPU.

    Flash attention's kernels, which iterate over lists of the tiles that the pattern
    and the mask leave, which are built on the device. ``cfg`` as for flash attention. Best where
    the blocks of the pattern are multiples of the tiles: a tile that covers several blocks is
    computed if one of them is seen.
    """

    call = calls.BlockSparseAttention
    reads = arguments.FLASH | arguments.PATTERN | arguments.DROPOUT | {"bias"}

    @staticmethod
    def choose(problem: Problem, target: Target) -> FlashTiles:
        chosen = tiles.choose(problem, target)
        if problem.pattern_blocks is None:
            return chosen
        fwd, dq = (
            _fit_to_blocks(t, "block_q", "block_kv", problem) for t in (chosen.fwd, chosen.dq)
        )
        return FlashTiles(fwd, dq, _fit_to_blocks(chosen.dkv, "block_kv", "block_q", problem))


def _fit_to_blocks(tile: Tiles, resident: str, streamed: str, problem: Problem) -> Tiles:
    """Shrinks ``tile`` to the size of a block of the pattern, but not below the minimum."""
    assert problem.pattern_blocks is not None
    block = dict(zip(("block_q", "block_kv"), problem.pattern_blocks, strict=True))
    fits = 1 << (block[streamed].bit_length() - 1)
    tile = replace(tile, **{streamed: min(getattr(tile, streamed), max(LEAST_STREAMED, fits))})
    while getattr(tile, resident) > max(LEAST_RESIDENT, block[resident]):
        tile = replace(
            tile,
            **{resident: getattr(tile, resident) // 2, "num_warps": max(4, tile.num_warps // 2)},
        )
    return tile


blocksparse_attention = BlockSparseAttention()
