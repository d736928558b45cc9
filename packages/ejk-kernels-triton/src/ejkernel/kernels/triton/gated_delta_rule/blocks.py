"""Launches with gates per key channel, whose programs hold a block of the channels at a time.

Factors, operands and accumulators of 128 channels leave the registers.
"""

from __future__ import annotations

from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import ChunkLaunch
from ejkernel.kernels.triton.gated_delta_rule.prepare import EPSILON, reciprocal_root
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.rows import POINTERS, load_rows, store_rows
from ejkernel.kernels.triton.linear_attention.tiles import width


class BlockLaunch(ChunkLaunch):
    """A launch whose programs hold a block of the key channels at a time.

    ``max_block``: channels of a block that fit into the registers.
    """

    max_block: ClassVar[int]

    @property
    def key_width(self) -> int:
        """Channels of a block."""
        return min(width(self.problem.dim), self.max_block)

    def arguments(self, target):
        p = self.problem
        return {
            "sizes": self.sizes(target),
            "scale": float(p.scale),
            "NORMALIZE": p.normalize,
            "BLOCK": self.key_width,
            "LEVELS": self.tiles.chunk.bit_length() - 1,
        }


@triton.jit
def load_block(x, base, tokens, head, channel, sizes, BLOCK: tl.constexpr):
    """Loads a block of the channels of queries or keys."""
    return load_rows(
        x, base, tokens, 0, head, sizes.kv_heads, channel, sizes.dim, sizes.CHUNK, BLOCK,
        sizes.MAPS,
    )  # fmt: skip


@triton.jit
def store_block(target, x, base, rows, head, channel, sizes, BLOCK: tl.constexpr):
    """Stores a block of the channels of an array as large as the keys."""
    store_rows(
        target, x, base, rows, head, sizes.kv_heads, channel, sizes.dim, sizes.CHUNK, BLOCK,
        sizes.MAPS,
    )  # fmt: skip


@triton.jit
def load_state_block(states, number, channel, sizes, BLOCK: tl.constexpr):
    """Loads channels of a state, rows of ``[count, dim, value_dim]``."""
    if sizes.MAPS == POINTERS:
        d = channel + tl.arange(0, BLOCK)[:, None]
        c = tl.arange(0, sizes.COLUMNS)[None, :]
        states += number * sizes.dim * sizes.value_dim + d * sizes.value_dim + c
        tile = tl.load(states, mask=(d < sizes.dim) & (c < sizes.value_dim), other=0.0)
    else:
        tile = states.load([(number * sizes.dim).to(tl.int32) + channel, 0])
    return tile


@triton.jit
def reciprocal_length(x, base, tokens, head, sizes, BLOCK: tl.constexpr):
    """Returns 1 / sqrt(sum of squares + epsilon) of every row, block by block."""
    squares = tl.zeros([sizes.CHUNK], tl.float32)
    for channel in tl.range(0, sizes.DIM, BLOCK, num_stages=1):
        row = load_block(x, base, tokens, head, channel, sizes, BLOCK).to(tl.float32)
        squares += tl.sum(row * row, 1)
    return reciprocal_root(squares + EPSILON)
