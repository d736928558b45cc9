"""Block-sparse attention on TPU: the kernels of flash attention over lists of blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.kernels.pallas.tpu.flash_attention import tiles
from ejkernel.kernels.pallas.tpu.flash_attention.implementation import (
    FlashAttention,
    kernel_lists,
)
from ejkernel.kernels.pallas.tpu.flash_attention.tiles import (
    KEYS_OUTER,
    FlashTiles,
    Tiles,
)
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import arguments

LISTS_BYTES = 2**19  # half of the scalar memory of a core


class BlockSparseAttention(FlashAttention):
    """Attention over the blocks that a pattern allows, on a TPU.

    Flash attention's kernels over lists of the tiles that the pattern and the mask leave, which lie
    in scalar memory; tiles that nobody sees are neither fetched nor computed. Blocks are multiples
    of 128 rows and keys, or as long as the sequence, and a tile lies in one block: the larger the
    blocks, the less a tile costs. Lists of patterns in numpy, and of ``mask_builder``, have no step
    without a tile. Dtypes, head dims, masks and ``cfg`` as in ``flash_attention``.
    """

    call = calls.BlockSparseAttention
    reads = arguments.FLASH | arguments.PATTERN

    def problem(self, a: Mapping[str, Any]) -> Problem:
        p, pattern = super().problem(a), a["block_mask"]
        if pattern is None or self.unsupported_reason(p, self.target()) is not None:
            return p
        chosen, lead = self.choose(p, self.target()), math.prod(pattern.shape[:2])
        size = 4 * lead * max(_entries(p, getattr(chosen, name), name) for name in chosen.kernels)
        if size > LISTS_BYTES:
            raise self.call.Unsupported(
                f"block_mask: lists of {size} bytes do not fit into scalar memory, at most "
                f"{LISTS_BYTES}; larger blocks, or one pattern for all heads, have shorter lists"
            )
        return p

    def unsupported_reason(self, problem: Problem, target: Chip) -> str | None:
        reason = super().unsupported_reason(problem, target)
        if reason is not None or problem.pattern_blocks is None:
            return reason
        names, lengths = ("q_block_size", "kv_block_size"), (problem.q_len, problem.kv_len)
        for name, size, length in zip(names, problem.pattern_blocks, lengths, strict=True):
            if size % LANES and size < length:
                return f"{name}: blocks of {size} are no multiple of {LANES}"
        return None

    @staticmethod
    def choose(problem: Problem, target: Chip) -> FlashTiles:
        return _inside_blocks(tiles.choose(problem, target), problem)

    def apply_config(
        self, chosen: FlashTiles, cfg: Any, problem: Problem, target: Chip
    ) -> FlashTiles:
        return _inside_blocks(super().apply_config(chosen, cfg, problem, target), problem)

    def neighbours(
        self, problem: Problem, target: Chip, chosen: FlashTiles
    ) -> Iterable[FlashTiles]:
        for other in super().neighbours(problem, target, chosen):
            yield _inside_blocks(other, problem)

    def backward_tiles(self, work: Work) -> Iterable[tuple[int, int]]:
        every = (getattr(work.tiles, name) for name in work.tiles.kernels if name != "fwd")
        return ((t.block_q, t.block_kv) for t in every)

    def precompute(self, work: Work, arrays: Arrays) -> Arrays:
        if not isinstance(arrays.get("pattern"), np.ndarray):
            return arrays
        kernels = work.tiles.kernels
        return arrays | {"lists": {name: kernel_lists(work, arrays, name) for name in kernels}}


def _entries(p: Problem, t: Tiles, kernel: str) -> int:
    """Returns the entries of the lists of a kernel, for one head."""
    outer, inner = -(-p.q_len // t.block_q), -(-p.kv_len // t.block_kv)
    return inner * (1 + outer) if kernel in KEYS_OUTER else outer * (1 + inner)


def _inside_blocks(chosen: FlashTiles, p: Problem) -> FlashTiles:
    """Returns tiles that lie in one block of the pattern each."""
    if p.pattern_blocks is None:
        return chosen
    lengths = (p.q_len, p.kv_len)
    q, kv = (
        size if size < length else 0 for size, length in zip(p.pattern_blocks, lengths, strict=True)
    )

    def shrink(t: Tiles, kernel: str) -> Tiles:
        block_q, block_kv = math.gcd(t.block_q, q), math.gcd(t.block_kv, kv)
        outer = block_kv if kernel in KEYS_OUTER else block_q
        return replace(t, block_q=block_q, block_kv=block_kv, rows=math.gcd(t.rows, outer))

    names = ("fwd", "dq", "dkv", *(() if chosen.fused is None else ("fused",)))
    return FlashTiles(**{name: shrink(getattr(chosen, name), name) for name in names})


blocksparse_attention = BlockSparseAttention()
