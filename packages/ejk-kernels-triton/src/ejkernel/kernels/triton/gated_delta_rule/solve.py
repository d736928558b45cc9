"""Inverses of unit lower triangular matrices, by blocks.

    (I + N)^-1        N strictly lower triangular [C, C], C = 16, 32 or 64

A block of 2 m rows follows from the inverses x of its halves: x - x n x, n being the lower left
quarter of the block. So blocks of 1, 2, 4, 8 rows grow to 16 rows, then to 32 and 64, all blocks of
a size together. Powers of N are never formed: where keys repeat they overflow.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def diagonal_blocks(x, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Returns the diagonal blocks ``[COUNT, SIZE, SIZE]`` of a matrix."""
    blocks = tl.reshape(x, (COUNT, SIZE, COUNT, SIZE))
    row = tl.arange(0, COUNT)[:, None, None, None]
    column = tl.arange(0, COUNT)[None, None, :, None]
    return tl.sum(tl.where(row == column, blocks, 0.0), 2)


@triton.jit
def join_pairs(x, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Returns ``[COUNT, 2 SIZE, 2 SIZE]`` with pairs of blocks of x ``[2 COUNT, SIZE, SIZE]`` on the
    diagonal."""
    pairs = tl.reshape(x, (COUNT, 2, SIZE, 1, SIZE))
    pairs = tl.broadcast_to(pairs, (COUNT, 2, SIZE, 2, SIZE))
    row = tl.arange(0, 2)[None, :, None, None, None]
    column = tl.arange(0, 2)[None, None, None, :, None]
    return tl.reshape(tl.where(row == column, pairs, 0.0), (COUNT, 2 * SIZE, 2 * SIZE))


@triton.jit
def in_lower_quarters(SIZE: tl.constexpr, M: tl.constexpr):
    """Whether an entry is in the lower left quarter of a block of 2 M rows ``[1, SIZE, SIZE]``."""
    row = tl.arange(0, SIZE)[None, :, None]
    column = tl.arange(0, SIZE)[None, None, :]
    return (row // (2 * M) == column // (2 * M)) & (row % (2 * M) >= M) & (column % (2 * M) < M)


@triton.jit
def double(x, n, SIZE: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverses of blocks of 2 M rows from those of M rows, all in blocks of SIZE."""
    below = tl.where(in_lower_quarters(SIZE, M), n, 0.0)
    below = tl.dot(below, x, input_precision=PRECISION)
    return x - tl.dot(x, below, input_precision=PRECISION)


@triton.jit
def invert(n, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of ``I + n``; ``n`` [SIZE, SIZE] is strictly lower triangular."""
    blocks = diagonal_blocks(n, SIZE // 16, 16)
    one = tl.arange(0, 16)[None, :, None] == tl.arange(0, 16)[None, None, :]
    x = one.to(tl.float32) - tl.where(in_lower_quarters(16, 1), blocks, 0.0)
    x = double(x, blocks, 16, 2, PRECISION)
    x = double(x, blocks, 16, 4, PRECISION)
    x = double(x, blocks, 16, 8, PRECISION)
    if SIZE >= 32:
        x = join_pairs(x, SIZE // 32, 16)
        x = double(x, diagonal_blocks(n, SIZE // 32, 32), 32, 16, PRECISION)
    if SIZE == 64:
        # the last quarter alone: a fourth of the arithmetic of full blocks
        half = tl.arange(0, 2)
        lower = (half[:, None, None, None] == 1) & (half[None, None, :, None] == 0)
        quarter = tl.where(lower, tl.reshape(n, (2, 32, 2, 32)), 0.0)
        quarter = tl.sum(tl.sum(quarter, 2), 0)
        first = tl.sum(tl.where(half[:, None, None] == 0, x, 0.0), 0)
        second = tl.sum(tl.where(half[:, None, None] == 1, x, 0.0), 0)
        quarter = tl.dot(quarter, first, input_precision=PRECISION)
        quarter = tl.dot(second, quarter, input_precision=PRECISION)
        quarter = tl.broadcast_to(tl.reshape(quarter, (1, 32, 1, 32)), (2, 32, 2, 32))
        quarter = tl.where(lower, quarter, 0.0)
        x = join_pairs(x, 1, 32) - tl.reshape(quarter, (1, 64, 64))
    return tl.reshape(x, (SIZE, SIZE))
