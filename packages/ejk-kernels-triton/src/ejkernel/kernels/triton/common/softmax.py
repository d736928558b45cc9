"""Online softmax in base 2, one tile at a time.

The running state of a row is its maximum m, the sum l of exp2((x - m) * slope) over the keys seen,
and the equally scaled output. A tile with no visible key has maximum -inf; the guard keeps
-inf - -inf from making a NaN.

``online_softmax`` subtracts x - m before it scales: the largest logit then adds exactly 1, however
large it is. That is an addition and a multiplication a score. ``fused_softmax`` makes it one
multiply-add, x * slope - b, with b = m * slope as rounded. A multiply-add rounds once, at its end,
so that all terms of a row have the factor exp2(e) in common; e = m * slope - b is the rounding
error of b, itself exact in float32. It is part of the state, and the caller divides by exp2(e) at
the end. For logits of 2^30 or more it might grow too large; there float32 logits differ by at least
64 (in base 2) or not at all, and a power of two as the slope, no larger than the natural one, keeps
e at 0, differences large, and m * slope finite. Not for float16, whose range is too small for
exp2(e).

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), section 3;
Dao, "FlashAttention-2" (2023), section 3.1.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax(x, m, l, slope, PER_ROW: tl.constexpr, GUARD: tl.constexpr):  # noqa: E741
    """Returns (p, m, l, alpha) after one tile; alpha is the factor of earlier accumulators.

    GUARD: rows may be empty so far. Other arguments: as of ``_relative``.
    """
    p, m, alpha = _relative(x, m, slope, PER_ROW, GUARD)
    return p, m, l * alpha + tl.sum(p, 1), alpha


@triton.jit
def rounded_softmax(x, m, slope, DTYPE: tl.constexpr):
    """Returns (p, m, sum of p, alpha) with p rounded to DTYPE before it is summed."""
    p, m, alpha = _relative(x, m, slope, True, True)
    p = p.to(DTYPE)
    return p, m, tl.sum(p.to(tl.float32), 1), alpha


@triton.jit
def _relative(x, m, slope, PER_ROW: tl.constexpr, GUARD: tl.constexpr):
    """Returns (p, m, alpha): probabilities relative to the new m.

    ``slope`` brings x to base 2: a positive scalar, with PER_ROW one for each row. x must not be a
    multiplication that the compiler may round differently in each of its uses.
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
    """Returns (p, m, l, e, alpha) by one multiply-add a score.

    Accumulators of p must be multiplied by exp2(-e) at the end; e is 0 before the first tile.
    ``power``: the slope of rows whose m is beyond ``large``.
    """
    m_new = tl.maximum(m, tl.max(x, 1))
    slope = tl.where(tl.abs(m_new) >= large, power, slope)
    base = tl.where(m_new == float("-inf"), 0.0, m_new) if GUARD else m_new
    b = base * slope
    p = tl.exp2(tl.fma(x, slope[:, None], -b[:, None]))
    # explicit fma: a compiler that fused the multiplication in b would undo its rounding
    alpha = tl.exp2(tl.fma(m, slope, -b) - e)
    e = tl.fma(base, slope, -b)
    return p, m_new, l * alpha + tl.sum(p, 1), e, alpha


@triton.jit
def capped_weight(y):
    """Returns w in [-1, 0] with tanh(x) = 1 + 2 w, for a tile y = 2 * log2(e) * x.

    w = -1 / (1 + 2^y). Neighbours a and b share one reciprocal, 1 / a = b / (a * b), the quotient
    as a squared reciprocal root, as below: the special-function unit is the bottleneck of a soft
    cap. Beyond 2^62, where w is effectively 0, a * b would overflow. A softmax of tanh needs only
    w: constants drop out of it. The slope 1 - tanh^2 is -4 (w + w^2).
    """
    y = tl.minimum(y, 62.0, propagate_nan=tl.PropagateNan.ALL)
    a, b = tl.split(tl.reshape(1.0 + tl.exp2(y), [y.shape[0], y.shape[1] // 2, 2]))
    root = tl.rsqrt(a * b)
    both = -root * root
    return tl.reshape(tl.join(both * b, both * a), y.shape)


@triton.jit
def tanh_from_exp2(y):
    """Returns tanh(x) for y = 2 * log2(e) * x: exact at both ends, no overflow, within 5e-7.

    1 - 2 / (1 + 2^y), the quotient as a squared reciprocal root: half the instructions of a
    division, and no more of the special-function unit.
    """
    root = tl.rsqrt(1.0 + tl.exp2(y))
    return 1.0 - 2.0 * (root * root)
