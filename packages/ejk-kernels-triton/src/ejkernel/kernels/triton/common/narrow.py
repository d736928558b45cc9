"""Float32 to 8-bit numbers, to nearest even, in integer operations that every GPU has.

What is beyond the largest number is cut to it; NaN stays NaN (0 as an integer).
"""

from __future__ import annotations

import triton
import triton.language as tl

HALF = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer


@triton.jit
def eight_bits(x, KIND: tl.constexpr):
    """int8 with the bits of the number nearest to ``x``. KIND: int8, float8_e4m3fn, float8_e5m2."""
    if KIND == "int8":
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        code = (x + HALF) - HALF
    elif KIND == "float8_e4m3fn":
        code = _float_bits(x, 3, 7, 448.0, 0x7F)
    else:
        code = _float_bits(x, 2, 15, 57344.0, 0x7E)
    return code.to(tl.int8)


@triton.jit
def _float_bits(
    x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr
):
    """int32 0 to 255: the bits of a float of 8 bits."""
    CUT: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # half of what is cut off, less one, and the last bit kept: ties go to even
    normal = bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)
    normal = (normal >> CUT) - ((127 - BIAS) << MANTISSA)
    # below the smallest normal number they are multiples of one step; the first normal follows
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS)
    small = (tl.minimum(size, LEAST) * (2.0 ** (BIAS - 1 + MANTISSA)) + HALF) - HALF
    code = tl.where(size < LEAST, small.to(tl.int32), normal)
    code = tl.where(x != x, NAN, code)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
