"""One tile of logits and what of it is seen, the same for forward and backward kernels.

``i`` and ``j`` are query and key indices shaped to broadcast to the tile, in either orientation:
``[rows, 1]`` and ``[1, columns]``, or transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.softmax import capped_weight
from ejkernel.kernels.triton.common.structure import visible


@triton.jit
def program_of(pid, blocks, batch, heads, ORDER: tl.constexpr):
    """(block, batch row, head) of a program.

    Blocks of one head follow each other, so that its keys stay in the L2 cache; where rows or
    heads share a bias, the programs that read the same part of it do.
    """
    if ORDER == 1:
        b = pid % batch
        block = (pid // batch) % blocks
        h = pid // (batch * blocks)
    elif ORDER == 2:
        h = pid % heads
        block = (pid // heads) % blocks
        b = pid // (heads * blocks)
    else:
        block = pid % blocks
        bh = pid // blocks
        b = bh // heads
        h = bh % heads
    return block, b, h


@triton.jit
def load_bias(
    bias,
    i,
    j,
    i0,
    j0,
    b,
    h,
    q_len,
    kv_len,
    bias_batch,
    bias_head,
    TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS_INSIDE: tl.constexpr,
    KEYS_INSIDE: tl.constexpr,
):
    """A tile of the bias, None without one; i0 and j0 are the first of ``i`` and ``j``.

    ``bias_batch`` and ``bias_head`` count rows. KEYS_INSIDE: every j is a key; what is not reads
    as 0. So do rows past the last unless ROWS_INSIDE, which is also for kernels whose rows do not
    meet: those of another head, or the last again, are not stored.
    """
    if bias is None:
        more = None
    elif TMA:
        more = bias.load([b * bias_batch + h * bias_head + i0, j0])
        if not ROWS_INSIDE:
            more = tl.where((i < q_len)[:, None], more, 0.0)
    else:
        # rows are reached in 64 bits once each; columns count within a row
        row = b * bias_batch + h * bias_head + tl.minimum(i, q_len - 1)
        at = bias + row.to(tl.int64)[:, None] * kv_len
        j = j[None, :]
        if KEYS_INSIDE:
            more = tl.load(at + j)
        else:
            more = tl.load(at + j, mask=j < kv_len, other=0.0)
    if TRANSPOSED and bias is not None:
        more = tl.trans(more)
    return more


@triton.jit
def tile_logits(
    s,
    more,
    scale,
    cap_in,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Products to logits x in base 2, up to what a softmax adds: x = slope * s + shift.

    ``slope`` and ``shift`` are numbers of the call. A bias ``more`` is added to products times
    ``scale``: in its own units, where a finite one stays finite. Without one ``scale`` is a sign,
    only when SCALED: such a product is exact. With a soft cap s is ``capped_weight`` of what
    ``cap_in`` multiplies.
    """
    if more is not None:
        # not a sum, which would become the start of the product and wait for the bias
        s = tl.fma(s, scale, more.to(tl.float32))
    elif SCALED:
        s = s * scale
    if CAPPED:
        s = capped_weight(s * cap_in)
    return s


@triton.jit
def cap_slope(w):
    """(1 - tanh^2) / -4 for w of ``capped_weight``."""
    return tl.fma(w, w, w)


@triton.jit
def mask_unseen(
    s,
    i,
    j,
    b,
    h,
    q_len,
    kv_len,
    lo,
    hi,
    chunk,
    chunk_offset,
    q_ids,
    kv_ids,
    ids_stride,
    q_positions,
    kv_positions,
    positions_stride,
    position_lo,
    position_hi,
    mask,
    mask_batch,
    mask_head,
    MASK_Q: tl.constexpr,
    MASK_KV: tl.constexpr,
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    POSITION_LO: tl.constexpr,
    POSITION_HI: tl.constexpr,
    KEYS_INSIDE: tl.constexpr,
):
    """``s`` with -inf where a row does not see a key, by every rule of the call.

    An element of ``mask`` speaks for MASK_Q rows and MASK_KV keys.
    """
    q_id = None
    kv_id = None
    if q_ids is not None:
        q_id = tl.load(q_ids + b * ids_stride * q_len + i, mask=i < q_len, other=-1)
        kv_id = tl.load(kv_ids + b * ids_stride * kv_len + j, mask=j < kv_len, other=-2)
    q_position = None
    kv_position = None
    if q_positions is not None:
        q_row = q_positions + b * positions_stride * q_len
        q_position = tl.load(q_row + i, mask=i < q_len, other=0)
        kv_row = kv_positions + b * positions_stride * kv_len
        kv_position = tl.load(kv_row + j, mask=j < kv_len, other=0)
    seen = visible(
        i, j, kv_len, lo, hi, chunk, chunk_offset, q_id, kv_id, q_position, kv_position,
        position_lo, position_hi, HAS_LO, HAS_HI, POSITION_LO, POSITION_HI, KEYS_INSIDE,
    )  # fmt: skip
    if mask is not None:
        corner = mask + b.to(tl.int64) * mask_batch + h.to(tl.int64) * mask_head
        inside = (i < q_len) & (j < kv_len)
        at = (i // MASK_Q).to(tl.int64) * tl.cdiv(kv_len, MASK_KV) + j // MASK_KV
        dense = tl.load(corner + at, mask=inside, other=0) != 0
        if seen is None:
            seen = dense
        else:
            seen = seen & dense
    if seen is not None:
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def probabilities(s, row_base, slope, FUSED: tl.constexpr):
    """exp2 of logits less lse, which the forward kernel gives in the units of s.

    Their difference is scaled, not they: so the largest logit gives the same in both kernels,
    however large it is. FUSED: logits are bounded by a soft cap, and one instruction does both;
    then lse is in base 2.
    """
    if FUSED:
        p = tl.exp2(s * slope - row_base)
    else:
        p = tl.exp2((s - row_base) * slope)
    return p


@triton.jit
def load_rows(values, i, length, EMPTY: tl.constexpr, EVEN: tl.constexpr):
    """Float32 of the rows ``i``, EMPTY past the last; EVEN: none is."""
    if EVEN:
        row = tl.load(values + i)
    else:
        row = tl.load(values + i, mask=i < length, other=EMPTY)
    return row
