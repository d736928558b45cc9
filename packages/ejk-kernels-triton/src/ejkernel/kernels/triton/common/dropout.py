"""The dropout mask: a hash of (seed, batch, head, query index, key index).

A pure function of those five numbers in uint32 arithmetic, the same on every backend, so no
random state is stored and the backward pass recomputes it. The mixing function is the 32-bit
finaliser of MurmurHash3 (Appleby); a row pays two of them, an element two multiplications.
Integer operations of elements are what dropout costs, so linear steps are moved to rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

_P1 = tl.constexpr(0x9E3779B1)
_P2 = tl.constexpr(0x85EBCA77)
_P3 = tl.constexpr(0xC2B2AE3D)
_P4 = tl.constexpr(0x27D4EB2F)
_P5 = tl.constexpr(0x165667B1)
_M1 = tl.constexpr(0x85EBCA6B)
_M2 = tl.constexpr(0xC2B2AE35)


@triton.jit
def _fmix(x):
    x = x ^ (x >> 16)
    x = x * tl.full([], _M1, tl.uint32)
    x = x ^ (x >> 13)
    x = x * tl.full([], _M2, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def head_key(seed, batch, head):
    """The part of the hash common to one batch row and head."""
    a = _fmix(seed.to(tl.uint32) + tl.full([], _P1, tl.uint32))
    a = _fmix(a + batch.to(tl.uint32) * tl.full([], _P2, tl.uint32))
    return _fmix(a + head.to(tl.uint32) * tl.full([], _P3, tl.uint32))


@triton.jit
def kept(key, i, j, threshold):
    """Boolean tile: which probabilities survive. ``i`` and ``j`` broadcast against each other."""
    r = _fmix(key + i.to(tl.uint32) * tl.full([], _P4, tl.uint32))
    s = _fmix(r ^ tl.full([], _P1, tl.uint32))
    # shift-xor is linear: (x ^ s) ^ ((x ^ s) >> 13) is x ^ (x >> 13) ^ (s ^ (s >> 13))
    s = s ^ (s >> 13)
    x = r + j.to(tl.uint32) * tl.full([], _P5, tl.uint32)
    x = x ^ (x >> 16)
    x = x * tl.full([], _M1, tl.uint32)
    x = x ^ (x >> 13) ^ s
    x = x * tl.full([], _M2, tl.uint32)
    x = x ^ (x >> 16)
    # x >> 8 >= threshold, for thresholds from 1 to 2**24, without the shift of every element
    return x > (threshold.to(tl.uint32) << 8) - 1
