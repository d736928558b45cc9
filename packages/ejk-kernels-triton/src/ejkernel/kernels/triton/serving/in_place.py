"""Results that share the memory of an operand, wherever XLA puts them.

A launch that names aliases writes only a part of a result; the rest is what the operand holds. XLA
promises that the two share memory, but its dynamic-slice fusion (on by default since jaxlib 0.11)
drops the promise: where a caller slices the operand out of a stack of caches, or updates a slice
with the result, the kernel gets the addresses of the slices. ``lax.scan`` over layers does both.
So a kernel whose operand comes from the caller, or whose result goes there, compares the two
addresses and copies what it does not write.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def is_elsewhere(operand, result):
    """Returns whether a result does not lie in the memory of its operand."""
    return operand.to(tl.uint64, bitcast=True) != result.to(tl.uint64, bitcast=True)


@triton.jit
def copy_if_elsewhere(operand, result, elements, BLOCK: tl.constexpr):
    """Copies an operand, all programs together, to a result that does not lie in its memory."""
    if is_elsewhere(operand, result):
        for block in tl.range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
            i = (tl.zeros([], tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
            tl.store(result + i, tl.load(operand + i, mask=i < elements), mask=i < elements)
