"""The dropout mask of a tile, from the words of its rows and its key indices.

The cost of dropout is integer operations: two finalisers of the hash a row, two multiplications an
element. The words of a row are computed once, by XLA (``dropout_rows``, 8 bytes a row):
where rows lie along the columns of a tile, every thread would recompute sixteen of them for its
thirty-two elements.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.types.attention.dropout import M1, M2, P5

_P5, _M1, _M2 = (tl.constexpr(int(x)) for x in (P5, M1, M2))


@triton.jit
def load_row_words(words, rows, i, length):
    """Loads (r, s) of the rows ``i``; ``rows`` is the flat int64 index of the first row."""
    at = words + 2 * rows + i
    return tl.load(at, mask=i < length, other=0), tl.load(at + length, mask=i < length, other=0)


@triton.jit
def offset_row_words(r, first, threshold):
    """Returns the row words ``r`` for keys counted from ``first``, the start of a block."""
    r = r + first.to(tl.uint32) * tl.full([], _P5, tl.uint32)
    # xor with an opaque zero: otherwise the compiler hoists the values of every element of a thread
    # out of the loop, a register each
    return r ^ (threshold.to(tl.uint32) >> 25)


@triton.jit
def mix_words(r, s, column):
    """Returns the uint32 tile for ``keep_mask``, most of the cost of dropout.

    ``r`` and ``s`` are the words of the rows, ``column`` the keys; all broadcast.
    """
    x = r + column.to(tl.uint32) * tl.full([], _P5, tl.uint32)
    x = x ^ (x >> 16)
    x = x * tl.full([], _M1, tl.uint32)
    x = x ^ (x >> 13) ^ s
    return x * tl.full([], _M2, tl.uint32)


@triton.jit
def keep_mask(x, threshold):
    """Returns a boolean tile of the probabilities that survive, from ``mix_words``."""
    # (x ^ (x >> 16)) >> 8 >= threshold, for thresholds from 1 to 2**24, is u > bound with u the
    # xor. Their upper halves decide unless equal, and then x >> 16 is the upper half of bound.
    bound = (threshold.to(tl.uint32) << 8) - 1
    return (x ^ (bound >> 16)) > bound
