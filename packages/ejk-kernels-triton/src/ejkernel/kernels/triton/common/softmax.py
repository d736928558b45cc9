"""Online softmax in base 2, one tile at a time.

The running state of a row is its maximum m, the sum l of exp2((x - m) * slope) over the keys seen,
and the equally scaled output. A tile with no visible key has maximum -inf; the guard keeps
-inf - -inf from making a NaN.

``online_softmax`` subtracts x - m before it scales: the largest logit then adds exactly 1, however
large it is. That is an addition and a multiplication a score. ``fused_softmax`` makes it one
multiply-add, x * slope - b, with b = m * slope as rounded. A multiply-add rounds once, at its end,
so that all terms of a row have the factor exp2(e) in common, e = m * slope - b being what the
rounding of b lost, itself a float32 number. It is carried along, and the end divides by its
power. From 2^30 on it might grow too large; there float32 logits differ by 64 or not at all (in
base 2), and a power of two as the slope, no larger than the natural one, keeps e at 0, a difference
large, and m * slope finite. Not for float16, which has not the range for exp2(e).

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3;
Dao, "FlashAttention-2" (2023), section 3.1.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax(x, m, l, slope, PER_ROW: tl.constexpr, GUARD: tl.constexpr):  # noqa: E741
    """One tile: returns (p, m, l, alpha), alpha being the factor for what was summed before.

    GUARD: rows may be empty so far. The others as below.
    """
    p, m, alpha = _relative(x, m, slope, PER_ROW, GUARD)
    return p, m, l * alpha + tl.sum(p, 1), alpha


@triton.jit
def rounded_softmax(x, m, slope, NUMBER: tl.constexpr):
    """The same with p in NUMBER: returns (p, m, sum of p, alpha)."""
    p, m, alpha = _relative(x, m, slope, True, True)
    p = p.to(NUMBER)
    return p, m, tl.sum(p.to(tl.float32), 1), alpha


@triton.jit
def _relative(x, m, slope, PER_ROW: tl.constexpr, GUARD: tl.constexpr):
    """(p, m, alpha): probabilities relative to the new m.

    ``slope`` brings x to base 2: a positive number, PER_ROW one for each. x must not be a product
    that may be rounded anew in each of its uses.
    """
    m_new = tl.maximum(m, tl.max(x, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new) if GUARD else m_new
    if PER_ROW:
        p = tl.exp2((x - base[:, None]) * slope[:, None])
    else:
        p = tl.exp2((x - base[:, None]) * slope)
    return p, m_new, tl.exp2((m - base) * slope)


@triton.jit
def fused_softmax(x, m, l, e, slope, power, large, GUARD: tl.constexpr):  # noqa: E741
    """The same by one multiply-add a score: returns (p, m, l, e, alpha).

    True sums are those of p times exp2(-e); e is 0 before the first tile. ``power``: the slope of
    rows whose m is beyond ``large``.
    """
    m_new = tl.maximum(m, tl.max(x, 1))
    slope = tl.where(tl.abs(m_new) >= large, power, slope)
    base = tl.where(m_new == float("-inf"), 0.0, m_new) if GUARD else m_new
    b = base * slope
    p = tl.exp2(tl.fma(x, slope[:, None], -b[:, None]))
    # multiply-adds by name: a compiler that fused the product b itself would undo its rounding
    alpha = tl.exp2(tl.fma(m, slope, -b) - e)
    e = tl.fma(base, slope, -b)
    return p, m_new, l * alpha + tl.sum(p, 1), e, alpha


@triton.jit
def capped_weight(y):
    """w in [-1, 0] with tanh(x) = 1 + 2 w, for a tile y = 2 * log2(e) * x.

    w = -1 / (1 + 2^y). Neighbours a and b share one reciprocal, 1 / a = b / (a * b), the quotient
    as a squared reciprocal root, as below: the special-function unit is what a soft cap waits for.
    Beyond 2^62, where w is 0 to any purpose, a product would overflow. A softmax of tanh needs only
    w: constants drop out of it. The slope 1 - tanh^2 is -4 (w + w^2).
    """
    y = tl.minimum(y, 62.0, propagate_nan=tl.PropagateNan.ALL)
    a, b = tl.split(tl.reshape(1.0 + tl.exp2(y), [y.shape[0], y.shape[1] // 2, 2]))
    root = tl.rsqrt(a * b)
    both = -root * root
    return tl.reshape(tl.join(both * b, both * a), y.shape)


@triton.jit
def tanh_from_exp2(y):
    """tanh(x) for y = 2 * log2(e) * x: exact at both ends, no overflow, within 5e-7.

    1 - 2 / (1 + 2^y), the quotient as a squared reciprocal root: half the instructions of a
    division, and no more of the special-function unit.
    """
    root = tl.rsqrt(1.0 + tl.exp2(y))
    return 1.0 - 2.0 * (root * root)
