"""Conversion of 8-bit values to float16, two columns at a time.

An 8-bit cache is read as int16: the value of an even column in the low byte, the value of the next
column in the high byte. Such a tile moves like a 16-bit tile with half the columns, so MMAs read it
from shared memory by the wide loads for 16-bit operands; its even and its odd columns then are
operands of two matmuls. All int8 and float8 values are exact in float16 and in bfloat16.

The PTX forms turn one register of four values into two registers of two:

* int8: ``0x6400 | (byte ^ 0x80)`` are the bits of 1152 + x.
* int8 with a bias: ``byte ^ 0x80`` are the bits of (x + 128) * 2**-24, a subnormal.
* float8_e5m2: the value is the high byte of its float16.
* float8_e4m3fn: an instruction since compute capability 8.9. Before, exponent and mantissa moved to
  float16's fields give the value times 2**-8, subnormals included, and NaN becomes 480 * 2**-8, the
  only magnitude that overflows float16 when multiplied by 36000: infinity times 0 is NaN again.
* int8 to bfloat16, which has one bit too few: the low seven bits above 128, less 128 or, with the
  sign, 256.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton

PAIRED_INT8 = tl.constexpr("""{
.reg .b32 high, bias;
mov.b32 bias, 0x64806480;
shr.u32 high, $2, 8;
lop3.b32 $0, $2, 0x00ff00ff, bias, 0x6a;
lop3.b32 $1, high, 0x00ff00ff, bias, 0x6a;
sub.rn.f16x2 $0, $0, bias;
sub.rn.f16x2 $1, $1, bias;
}""")
PAIRED_INT8_BIASED = tl.constexpr("""{
.reg .b32 high, sign;
mov.b32 sign, 0x00800080;
shr.u32 high, $2, 8;
lop3.b32 $0, $2, 0x00ff00ff, sign, 0x6a;
lop3.b32 $1, high, 0x00ff00ff, sign, 0x6a;
}""")
PAIRED_E5M2 = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x2404;
and.b32 $1, $2, 0xff00ff00;
}""")
PAIRED_E4M3 = tl.constexpr("""{
.reg .b32 sorted;
.reg .b16 even, odd;
prmt.b32 sorted, $2, 0, 0x3120;
mov.b32 {even, odd}, sorted;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
PAIRED_E4M3_BITS = tl.constexpr("""{
.reg .b32 low, high, huge, zero, scale;
mov.b32 zero, 0x00000000;
mov.b32 scale, 0x5c005c00;
shl.b32 low, $2, 8;
shl.b32 high, $2, 7;
and.b32 high, high, 0x3f803f80;
lop3.b32 low, low, 0x80008000, high, 0xea;
shr.u32 high, $2, 1;
and.b32 high, high, 0x3f803f80;
lop3.b32 high, $2, 0x80008000, high, 0xea;
mul.rn.f16x2 $0, low, scale;
mul.rn.f16x2 $1, high, scale;
mov.b32 huge, 0x78657865;
mul.rn.f16x2 low, low, huge;
mul.rn.f16x2 high, high, huge;
fma.rn.f16x2 $0, low, zero, $0;
fma.rn.f16x2 $1, high, zero, $1;
}""")

PAIRED_INT8_BFLOAT16 = tl.constexpr("""{
.reg .b32 high, start, edge, one, rest, sign;
mov.b32 start, 0x43004300;
mov.b32 edge, 0xc300c300;
mov.b32 one, 0x3f803f80;
shr.u32 high, $2, 8;
lop3.b32 rest, $2, 0x007f007f, start, 0xea;
lop3.b32 sign, $2, 0x00800080, edge, 0xea;
fma.rn.bf16x2 $0, rest, one, sign;
lop3.b32 rest, high, 0x007f007f, start, 0xea;
lop3.b32 sign, high, 0x00800080, edge, 0xea;
fma.rn.bf16x2 $1, rest, one, sign;
}""")

# the same four values, adjacent columns together
INT8_FLOAT16 = tl.constexpr("""{
.reg .b32 flipped, bias, above;
mov.b32 bias, 0x64806480;
mov.b32 above, 0x64646464;
xor.b32 flipped, $2, 0x80808080;
prmt.b32 $0, flipped, above, 0x4140;
prmt.b32 $1, flipped, above, 0x4342;
sub.rn.f16x2 $0, $0, bias;
sub.rn.f16x2 $1, $1, bias;
}""")
INT8_BFLOAT16 = tl.constexpr("""{
.reg .b32 sign, bias, minus;
mov.b32 bias, 0x43004300;
mov.b32 minus, 0xbf80bf80;
prmt.b32 $0, $2, 0, 0x4140;
prmt.b32 $1, $2, 0, 0x4342;
lop3.b32 sign, $0, 0x00800080, bias, 0xea;
lop3.b32 $0, $0, 0x007f007f, bias, 0xea;
fma.rn.bf16x2 $0, sign, minus, $0;
lop3.b32 sign, $1, 0x00800080, bias, 0xea;
lop3.b32 $1, $1, 0x007f007f, bias, 0xea;
fma.rn.bf16x2 $1, sign, minus, $1;
}""")
_ADJACENT_E5M2 = """prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;"""
_ADJACENT_E4M3 = """.reg .b16 first, second;
mov.b32 {first, second}, $2;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;"""
# through float32: a direct conversion of float16 to bfloat16 has a quarter of the rate
_TO_BFLOAT16 = """.reg .b16 low, high;
.reg .f32 left, right;
""" + "\n".join(
    f"""mov.b32 {{low, high}}, {register};
cvt.f32.f16 left, low;
cvt.f32.f16 right, high;
cvt.rn.bf16x2.f32 {register}, right, left;"""
    for register in ("$0", "$1")
)
E5M2_FLOAT16 = tl.constexpr(f"{{\n{_ADJACENT_E5M2}\n}}")
E5M2_BFLOAT16 = tl.constexpr(f"{{\n{_ADJACENT_E5M2}\n{_TO_BFLOAT16}\n}}")
E4M3_FLOAT16 = tl.constexpr(f"{{\n{_ADJACENT_E4M3}\n}}")
E4M3_BFLOAT16 = tl.constexpr(f"{{\n{_ADJACENT_E4M3}\n{_TO_BFLOAT16}\n}}")


@triton.jit
def convert_pairs_to(pairs, KIND: tl.constexpr, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Converts int16 ``pairs`` to (even, odd) operands of a matmul in DTYPE, all exact.

    float16 becomes bfloat16 through float32: the direct instruction has a quarter of the rate.
    """
    if DTYPE == tl.bfloat16 and KIND == "int8" and PTX > 0:
        even, odd = tl.inline_asm_elementwise(
            PAIRED_INT8_BFLOAT16,
            "=&r,=&r,r",
            [pairs],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        even, odd = convert_pairs(pairs, KIND, PTX)
        even, odd = even.to(tl.float32).to(DTYPE), odd.to(tl.float32).to(DTYPE)
    return even, odd


@triton.jit
def convert_pairs(pairs, KIND: tl.constexpr, PTX: tl.constexpr):
    """Converts the low and the high bytes of int16 ``pairs`` to float16 (even, odd).

    KIND: int8, float8_e4m3fn or float8_e5m2. PTX: compute capability times ten whose instructions
    may be used (80 or 89), 0 for none.
    """
    if PTX == 0:
        return _convert_byte(pairs & 0xFF, KIND), _convert_byte((pairs >> 8) & 0xFF, KIND)
    elif KIND == "int8":
        return _convert_pairs_by_ptx(pairs, PAIRED_INT8)
    elif KIND == "float8_e5m2":
        return _convert_pairs_by_ptx(pairs, PAIRED_E5M2)
    elif PTX >= 89:
        return _convert_pairs_by_ptx(pairs, PAIRED_E4M3)
    else:
        return _convert_pairs_by_ptx(pairs, PAIRED_E4M3_BITS)


@triton.jit
def convert_biased_pairs(pairs, PTX: tl.constexpr):
    """Converts int8 values x in int16 ``pairs`` to float16 (even, odd): (x + 128) * 2**-24.

    These are the bytes with the sign bit flipped, subnormals that MMAs multiply exactly.
    """
    if PTX == 0:
        return _convert_biased_byte(pairs), _convert_biased_byte(pairs >> 8)
    else:
        return _convert_pairs_by_ptx(pairs, PAIRED_INT8_BIASED)


@triton.jit
def _convert_biased_byte(pairs):
    """Returns ``convert_biased_pairs`` of the low bytes, in portable operations."""
    return ((pairs & 0xFF) ^ 0x80).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def convert_rows(pairs, KIND: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Converts int16 ``pairs [rows, n]`` to ``[rows, 2 * n]`` in DTYPE, float16 or bfloat16.

    For MMAs that read shared memory: the tile is written there once, converted.
    """
    IS_FLOAT16: tl.constexpr = DTYPE == tl.float16
    if PTX < 89:
        even, odd = convert_pairs(pairs, KIND, PTX)
        tile = tl.interleave(even, odd).to(DTYPE)
    elif KIND == "int8":
        tile = _convert_adjacent_by_ptx(pairs, INT8_FLOAT16 if IS_FLOAT16 else INT8_BFLOAT16, DTYPE)
    elif KIND == "float8_e5m2":
        tile = _convert_adjacent_by_ptx(pairs, E5M2_FLOAT16 if IS_FLOAT16 else E5M2_BFLOAT16, DTYPE)
    else:
        tile = _convert_adjacent_by_ptx(pairs, E4M3_FLOAT16 if IS_FLOAT16 else E4M3_BFLOAT16, DTYPE)
    return tile


@triton.jit
def _convert_adjacent_by_ptx(pairs, TEXT: tl.constexpr, DTYPE: tl.constexpr):
    """Returns ``[rows, 2 * n]`` in DTYPE of int16 ``pairs [rows, n]``, by the PTX of TEXT."""
    two = tl.inline_asm_elementwise(TEXT, "=&r,=&r,r", [pairs], tl.int32, is_pure=True, pack=2)
    low = two.to(tl.int16).to(DTYPE, bitcast=True)
    high = (two >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def _convert_pairs_by_ptx(pairs, TEXT: tl.constexpr):
    """Returns float16 (even, odd) of int16 ``pairs``, by the PTX of TEXT."""
    # early clobber: results are written before the operand is last read
    return tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def _convert_byte(byte, KIND: tl.constexpr):
    """Returns the float16 that int16 ``byte`` (0 to 255) stands for, in portable operations."""
    if KIND == "int8":
        bits = (byte ^ 0x6480).to(tl.int16)
        value = bits.to(tl.float16, bitcast=True) - 1152.0
    elif KIND == "float8_e5m2":
        value = (byte << 8).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        low = byte & 0x7F
        bits = (((byte & 0x80) << 8) | (low << 7)).to(tl.int16)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        value = tl.where(low == 0x7F, float("nan"), value)
    return value.to(tl.float16)
