"""Scores with 8-bit keys that need few conversion instructions, or none.

A tile of keys is int16 ``[BLOCK, n]`` as in ``common.eight_bit``, two adjacent columns an element.
As there, it is multiplied twice, with two operands made from the queries. FORM:

* int8_split: int8 keys are operands without conversion. Queries are 16-bit integers, the largest
  of a row 32512, in two digits: high * 256 + low. The int32 accumulation is exact. The error of a
  query is at most 1 / 65024 of the largest of its row, a sixteenth of the error of rounding that
  one to float16.
* column_pairs: the first two of every four columns, and the other two. One instruction converts two
  adjacent float8_e4m3fn to float16; even and odd columns would have to be sorted first.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.eight_bit import convert_pairs
from ejkernel.kernels.triton.language import tl, triton

MAX_QUERY = tl.constexpr(32512.0)  # 127 * 256: both digits fit int8
TWO_E4M3 = tl.constexpr("cvt.rn.f16x2.e4m3x2 $0, $1;")


@triton.jit
def split_digits(q, scale):
    """Returns int8 (high, low) digits of ``q [rows, n]`` * ``scale [rows]``, at most MAX_QUERY."""
    # the low bits of a float32 of this size are the integer: conversions have a fourth of the rate
    x = (q * scale[:, None] + 1.5 * 2.0**23).to(tl.int32, bitcast=True)
    return ((x + 128) >> 8).to(tl.int8), x.to(tl.int8)


@triton.jit
def split_column_pairs(q):
    """Splits every four columns of ``q [rows, n]``: (first two, others), ``[rows, n / 2]`` each."""
    q = tl.reshape(q, [q.shape[0], q.shape[1] // 4, 2, 2])
    first, others = tl.split(tl.permute(q, (0, 1, 3, 2)))
    shape: tl.constexpr = [q.shape[0], q.shape[1] * 2]
    return tl.reshape(first, shape), tl.reshape(others, shape)


@triton.jit
def convert_adjacent(pairs, KIND: tl.constexpr, PTX: tl.constexpr):
    """Converts int16 ``pairs [rows, n]`` to float16 ``[rows, 2 n]``."""
    if PTX == 0:
        low, high = convert_pairs(pairs, KIND, PTX)
    else:
        two = tl.inline_asm_elementwise(TWO_E4M3, "=r,h", [pairs], tl.int32, is_pure=True, pack=1)
        low = two.to(tl.int16).to(tl.float16, bitcast=True)
        high = (two >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def add_scores(sums, q, q_other, tile, FORM: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr):
    """Returns the accumulators ``sums`` of both matmuls plus ``tile``; None: start from 0."""
    if FORM == "int8_split":
        keys = tl.trans(tl.interleave(tile.to(tl.int8), (tile >> 8).to(tl.int8)))
        other_keys = keys
        zeros = tl.zeros([q.shape[0], tile.shape[0]], tl.int32)
    else:
        first, second = tl.split(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2]))
        keys = tl.trans(convert_adjacent(first, KIND, PTX))
        other_keys = tl.trans(convert_adjacent(second, KIND, PTX))
        zeros = tl.zeros([q.shape[0], tile.shape[0]], tl.float32)
    if sums is None:
        sums = (zeros, zeros)
    return tl.dot(q, keys, sums[0]), tl.dot(q_other, other_keys, sums[1])


@triton.jit
def combine_scores(sums, FORM: tl.constexpr):
    """Returns float32 scores from the accumulators of both matmuls."""
    first, second = sums
    # explicit fma: the compiler would make one accumulator the start of the other matmul
    if FORM == "int8_split":
        factor = tl.full(first.shape, 256.0, tl.float32)
        s = tl.fma(first.to(tl.float32), factor, second.to(tl.float32))
    else:
        s = tl.fma(second, tl.full(first.shape, 1.0, tl.float32), first)
    return s
