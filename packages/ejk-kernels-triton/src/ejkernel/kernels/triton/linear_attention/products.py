"""Products of float32 numbers as three of bfloat16 ones.

A number is a bfloat16 one and the rest, rounded to one: 16 bits. Of two such numbers

    a b = high high + high low + low high        to 2^-16

where one product in TF32 has 2^-11. On Hopper, asynchronous products read TF32 operands from shared
memory only along the summed axis, so that arrays of rows which are summed over their rows would be
transposed number by number; bfloat16 ones are read either way. So the three take less time there
than the one.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def parts(x, OPERAND: tl.constexpr, SPLIT: tl.constexpr):
    """x as a product takes it: (its bfloat16 number, the rest) with SPLIT, else twice the same."""
    if SPLIT:
        # rounded as an integer: a conversion there and back goes number by number, at a quarter of
        # the rate of one of pairs
        bits = (x.to(tl.float32).to(tl.int32, bitcast=True) + 0x8000) & -65536
        high = bits.to(tl.float32, bitcast=True)
        low = (x - high).to(tl.bfloat16)
        high = high.to(tl.bfloat16)
    else:
        high = x.to(OPERAND)
        low = high
    return high, low


@triton.jit
def product(a, a_low, b, b_low, total, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """a b, added to ``total`` unless that is None; with SPLIT of ``parts``."""
    if SPLIT:  # the small ones first
        total = tl.dot(a_low, b, total)
        total = tl.dot(a, b_low, total)
        total = tl.dot(a, b, total)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total
