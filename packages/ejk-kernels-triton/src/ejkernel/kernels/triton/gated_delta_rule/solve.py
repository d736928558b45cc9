"""Inverses of unit lower triangular matrices, by blocks.

    (I + N)^-1        N strictly lower triangular [C, C], C = 16, 32 or 64

The inverse of a block of 2 m rows has the inverses x of its halves on the diagonal, and -x n x
below, n being the lower left quarter of the block. So blocks of 1, 2, 4, 8 rows grow to 16 rows,
and those to 32 and 64, all blocks of a size together. Powers of N are never formed: where keys
repeat they overflow.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def round_to_tf32(x):
    """Returns the nearest value of 11 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """Returns a b.

    "tf32x3" has the three matmuls of Triton's own, with the same bits, without its test of every
    sum for NaN, which keeps infinite ones: a fifth of the instructions of an inverse.
    """
    if PRECISION == "tf32x3":
        a_high = round_to_tf32(a)
        b_high = round_to_tf32(b)
        product = tl.dot(a - a_high, b_high, input_precision="tf32")
        product = tl.dot(a_high, b - b_high, product, input_precision="tf32")
        return tl.dot(a_high, b_high, product, input_precision="tf32")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def split_halves(x, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Splits blocks of 2 SIZE rows: (their diagonal blocks ``[2 COUNT, SIZE, SIZE]``, their lower
    left quarters ``[COUNT, SIZE, SIZE]``)."""
    x = tl.reshape(x, (COUNT, 2, SIZE, 2, SIZE))
    left, right = tl.split(tl.permute(x, (0, 1, 2, 4, 3)))
    half = tl.arange(0, 2)[None, :, None, None]
    diagonal = tl.where(half == 0, left, right)
    _, quarter = tl.split(tl.permute(left, (0, 2, 3, 1)))
    return tl.reshape(diagonal, (2 * COUNT, SIZE, SIZE)), quarter


@triton.jit
def join_halves(x, quarter, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Returns blocks of 2 SIZE rows with these diagonal blocks and lower left quarters."""
    x = tl.reshape(x, (COUNT, 2, SIZE, SIZE))
    half = tl.arange(0, 2)[None, :, None, None]
    left = tl.where(half == 0, x, quarter[:, None, :, :])
    right = tl.where(half == 0, 0.0, x)
    x = tl.permute(tl.join(left, right), (0, 1, 2, 4, 3))
    return tl.reshape(x, (COUNT, 2 * SIZE, 2 * SIZE))


@triton.jit
def double(x, quarter, COUNT: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverses of blocks of 2 SIZE rows; x has the inverses of their halves."""
    halves = tl.reshape(x, (COUNT, 2, SIZE, SIZE))
    first, second = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    if COUNT == 1:
        # matmuls of more than one block take other instructions
        first = tl.reshape(first, (SIZE, SIZE))
        second = tl.reshape(second, (SIZE, SIZE))
        quarter = tl.reshape(quarter, (SIZE, SIZE))
    quarter = multiply(quarter, first, PRECISION)
    quarter = multiply(second, quarter, PRECISION)
    return join_halves(x, -tl.reshape(quarter, (COUNT, SIZE, SIZE)), COUNT, SIZE)


@triton.jit
def grow(x, n, M: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverses of blocks of 2 M rows; x has the inverses of their halves, M < 16."""
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    below = (row // (2 * M) == column // (2 * M)) & (row % (2 * M) >= M) & (column % (2 * M) < M)
    below = tl.where(below, n, 0.0)
    if M > 1:
        below = multiply(multiply(x, below, PRECISION), x, PRECISION)
    return x - below


@triton.jit
def invert(n, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of ``I + n``, and reads n [SIZE, SIZE] below the diagonal only."""
    blocks = tl.reshape(n, (1, SIZE, SIZE))
    if SIZE == 64:
        blocks, quarter = split_halves(blocks, 1, 32)
    if SIZE >= 32:
        blocks, small_quarters = split_halves(blocks, SIZE // 32, 16)
    same = tl.arange(0, 16)[None, :, None] == tl.arange(0, 16)[None, None, :]
    x = grow(tl.broadcast_to(same.to(tl.float32), (SIZE // 16, 16, 16)), blocks, 1, PRECISION)
    x = grow(x, blocks, 2, PRECISION)
    x = grow(x, blocks, 4, PRECISION)
    x = grow(x, blocks, 8, PRECISION)
    if SIZE >= 32:
        x = double(x, small_quarters, SIZE // 32, 16, PRECISION)
    if SIZE == 64:
        x = double(x, quarter, 1, 32, PRECISION)
    return tl.reshape(x, (SIZE, SIZE))
