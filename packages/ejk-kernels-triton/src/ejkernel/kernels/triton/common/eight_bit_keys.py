"""Scores with 8-bit keys that few instructions convert, or none.

A tile of keys is what ``common.eight_bit`` reads: int16 ``[BLOCK, n]``, neighbours in one. As
there, two products meet it, of two operands made of the queries. FORM:

* digits: int8 keys are operands as they are. Queries are numbers of 16 bits, the largest of a row
  32512, as two digits: high * 256 + low. Products and their sums are integers, exact. A query is
  off by at most 1 / 65024 of the largest of its row, a sixteenth of what rounding that one to
  float16 cost.
* quads: of every four columns the first two, and the others. One instruction makes two float16 of
  two neighbours of float8_e4m3fn; even and odd columns would have to be sorted first.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.eight_bit import pair_numbers
from ejkernel.kernels.triton.language import tl, triton

LARGEST = tl.constexpr(32512.0)  # 127 * 256: both digits fit int8
TWO_E4M3 = tl.constexpr("cvt.rn.f16x2.e4m3x2 $0, $1;")


@triton.jit
def digits(q, scale):
    """int8 (high, low) digits of ``q [rows, n]`` times ``scale [rows]``, at most LARGEST."""
    # a sum of this size ends in the bits of the whole number: conversions have a fourth of the rate
    x = (q * scale[:, None] + 1.5 * 2.0**23).to(tl.int32, bitcast=True)
    return ((x + 128) >> 8).to(tl.int8), x.to(tl.int8)


@triton.jit
def quads(q):
    """(first two, others) of every four columns of ``q [rows, n]``: ``[rows, n / 2]`` each."""
    q = tl.reshape(q, [q.shape[0], q.shape[1] // 4, 2, 2])
    first, others = tl.split(tl.permute(q, (0, 1, 3, 2)))
    shape: tl.constexpr = [q.shape[0], q.shape[1] * 2]
    return tl.reshape(first, shape), tl.reshape(others, shape)


@triton.jit
def neighbours(pairs, KIND: tl.constexpr, PTX: tl.constexpr):
    """float16 ``[rows, 2 n]`` of int16 ``pairs [rows, n]``."""
    if PTX == 0:
        low, high = pair_numbers(pairs, KIND, PTX)
    else:
        two = tl.inline_asm_elementwise(TWO_E4M3, "=r,h", [pairs], tl.int32, is_pure=True, pack=1)
        low = two.to(tl.int16).to(tl.float16, bitcast=True)
        high = (two >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def add_scores(sums, q, q_other, tile, FORM: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr):
    """``sums``, of both products apart, plus those with ``tile``; None: nothing so far."""
    if FORM == "digits":
        one = tl.trans(tl.interleave(tile.to(tl.int8), (tile >> 8).to(tl.int8)))
        other = one
        none = tl.zeros([q.shape[0], tile.shape[0]], tl.int32)
    else:
        first, second = tl.split(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2]))
        one = tl.trans(neighbours(first, KIND, PTX))
        other = tl.trans(neighbours(second, KIND, PTX))
        none = tl.zeros([q.shape[0], tile.shape[0]], tl.float32)
    if sums is None:
        sums = (none, none)
    return tl.dot(q, one, sums[0]), tl.dot(q_other, other, sums[1])


@triton.jit
def whole_scores(sums, FORM: tl.constexpr):
    """float32 scores of the sums of both products."""
    one, other = sums
    # multiply-adds by name: the compiler would make one product's sum where the other begins
    if FORM == "digits":
        factor = tl.full(one.shape, 256.0, tl.float32)
        s = tl.fma(one.to(tl.float32), factor, other.to(tl.float32))
    else:
        s = tl.fma(other, tl.full(one.shape, 1.0, tl.float32), one)
    return s
