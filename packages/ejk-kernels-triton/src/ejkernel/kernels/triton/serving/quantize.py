"""Rounding of float32 to 8-bit values, and of quotients by a divisor that all elements share.

Rounding is to nearest even and saturates; NaN stays NaN (0 as an integer). Since compute capability
8.9 one instruction converts two 8-bit floats; before, and on other GPUs, integer operations build
them.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton

HALF = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
ABOVE = tl.constexpr(0x4B400100)  # bits of HALF + 256
NARROWEST = tl.constexpr(2.0**-60)  # divisors in this range: no relevant remainder underflows
WIDEST = tl.constexpr(2.0**60)
CONVERT_FOUR = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
E4M3 = tl.constexpr(CONVERT_FOUR.format("e4m3"))
E5M2 = tl.constexpr(CONVERT_FOUR.format("e5m2"))


@triton.jit
def round_to_8_bits(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns the bits of the value nearest to ``x``, as int8.

    DTYPE: int8, float8_e4m3fn, float8_e5m2.
    PTX: compute capability times ten whose instructions may be used.
    """
    if DTYPE == "int8":
        code = _round_to_int8(_clip(x, -128.0, 127.0))
    elif PTX >= 89:
        code = tl.inline_asm_elementwise(
            E4M3 if DTYPE == "float8_e4m3fn" else E5M2, "=r,r,r,r,r", [x], tl.int8, is_pure=True,
            pack=4,
        )  # fmt: skip
    elif DTYPE == "float8_e4m3fn":
        code = _float_bits(x, 3, 7, 448.0, 0x7F).to(tl.int8)
    else:
        code = _float_bits(x, 2, 15, 57344.0, 0x7E).to(tl.int8)
    return code


@triton.jit
def divide_to_8_bits(x, divisor, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns the bits of the quotients ``x / divisor``, rounded like ``round_to_8_bits`` of them.

    An exact division takes 14 instructions an element, three of them at a quarter of the rate. Two
    corrections by the remainder give the same result from a multiplication by the rounded
    reciprocal: the first gets within a unit in the last place, the second rounds correctly.
    Remainders are exact where nothing underflows; values that would overflow are clipped before.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor"
    (1990), for the last step.
    """
    if PTX > 0 and (divisor >= NARROWEST and divisor <= WIDEST):
        # clipped values have quotients that saturate anyway
        LEAST: tl.constexpr = -128.0 if DTYPE == "int8" else -57344.0
        MOST: tl.constexpr = 127.0 if DTYPE == "int8" else 57344.0
        x = _clip(x, LEAST * divisor, MOST * divisor)
        shared = tl.div_rn(1.0, divisor)
        quotient = x * shared
        # the signs are chosen so that a remainder of 0 preserves -0
        quotient = tl.fma(tl.fma(quotient, divisor, -x), -shared, quotient)
        quotient = tl.fma(tl.fma(quotient, divisor, -x), -shared, quotient)
        code = (
            _round_to_int8(quotient) if DTYPE == "int8" else round_to_8_bits(quotient, DTYPE, PTX)
        )
    else:
        code = round_to_8_bits(tl.div_rn(x, tl.zeros_like(x) + divisor), DTYPE, PTX)
    return code


@triton.jit
def _round_to_int8(x):
    """Rounds values from -128 to 127 to int8, in the lowest bits of x + HALF; NaN becomes 0."""
    bits = (x + HALF).to(tl.uint32, bitcast=True)
    return tl.minimum(bits, ABOVE).to(tl.int8)


@triton.jit
def _clip(x, least, most):
    """Clips ``x`` to [least, most]; NaN stays."""
    x = tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _float_bits(
    x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr
):
    """Returns the bits of an 8-bit float as int32 from 0 to 255."""
    CUT: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # add half of the dropped bits' range, less one, and the last bit that stays: ties go to even
    normal = bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)
    normal = (normal >> CUT) - ((127 - BIAS) << MANTISSA)
    # subnormals are multiples of one step; the smallest normal follows them
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS)
    small = (tl.minimum(size, LEAST) * (2.0 ** (BIAS - 1 + MANTISSA)) + HALF) - HALF
    code = tl.where(size < LEAST, small.to(tl.int32), normal)
    code = tl.where(x != x, NAN, code)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
