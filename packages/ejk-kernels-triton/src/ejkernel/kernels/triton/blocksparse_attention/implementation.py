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

# of a tile: fewer make products of matrix instructions too short, or leave warps without any
LEAST_WALKED, LEAST_HELD = 32, 64


class BlockSparseAttention(FlashAttention):
    """Attention over the blocks that a pattern allows, on a GPU.

    The kernels are those of flash attention; they walk lists of the tiles that the pattern and the
    mask leave, which are made on the device. ``cfg`` as there. Best where the blocks of the pattern
    are multiples of the tiles: a tile that covers several blocks is computed if one of them is
    seen.
    """

    call = calls.BlockSparseAttention
    reads = arguments.FLASH | arguments.PATTERN | arguments.DROPOUT | {"bias"}

    @staticmethod
    def choose(problem: Problem, target: Target) -> FlashTiles:
        chosen = tiles.choose(problem, target)
        if problem.pattern_blocks is None:
            return chosen
        fwd, dq = (_fitted(t, "block_q", "block_kv", problem) for t in (chosen.fwd, chosen.dq))
        return FlashTiles(fwd, dq, _fitted(chosen.dkv, "block_kv", "block_q", problem))


def _fitted(tile: Tiles, held: str, walked: str, problem: Problem) -> Tiles:
    """``tile`` with no more rows and keys than a block of the pattern, down to the least."""
    assert problem.pattern_blocks is not None
    block = dict(zip(("block_q", "block_kv"), problem.pattern_blocks, strict=True))
    fits = 1 << (block[walked].bit_length() - 1)
    tile = replace(tile, **{walked: min(getattr(tile, walked), max(LEAST_WALKED, fits))})
    while getattr(tile, held) > max(LEAST_HELD, block[held]):
        tile = replace(
            tile, **{held: getattr(tile, held) // 2, "num_warps": max(4, tile.num_warps // 2)}
        )
    return tile


blocksparse_attention = BlockSparseAttention()
