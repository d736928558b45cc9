"""One tile of logits and what of it is seen, the same for forward and backward kernels.

``i`` and ``j`` are query and key indices shaped to broadcast to the tile, in either orientation:
``[rows, 1]`` and ``[1, columns]``, or transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.softmax import LOG2E, capped_weight
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
def tile_logits(
    s,
    i,
    j,
    b,
    h,
    q_len,
    kv_len,
    bias,
    bias_batch,
    bias_head,
    bias_scale,
    scale,
    cap_in,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    KEYS_INSIDE: tl.constexpr,
):
    """Products to logits x in base 2, up to what a softmax adds: x = slope * s + shift.

    ``slope`` and ``shift`` are numbers of the call. ``bias_scale`` brings a bias to the units of
    s, ``scale`` is applied here only when SCALED. With a soft cap s is ``capped_weight`` of what
    ``cap_in`` multiplies. KEYS_INSIDE: every j is a key.
    """
    if SCALED:
        s = s * scale
    if bias is not None:
        corner = bias + b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head
        # rows are reached in 64 bits once each; columns count within a row. Rows past the last
        # read it again: what they give is masked or not stored
        at = corner + tl.minimum(i, q_len - 1).to(tl.int64) * kv_len
        if KEYS_INSIDE:
            more = tl.load(at + j)
        else:
            more = tl.load(at + j, mask=j < kv_len, other=0.0)
        s = s + more.to(tl.float32) * bias_scale
    if CAPPED:
        s = capped_weight(s * cap_in)
    return s


@triton.jit
def cap_slope(w):
    """1 - tanh^2 for w of ``capped_weight``."""
    quarter = -4.0 * w
    return quarter * w + quarter


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
    HAS_LO: tl.constexpr,
    HAS_HI: tl.constexpr,
    POSITION_LO: tl.constexpr,
    POSITION_HI: tl.constexpr,
    KEYS_INSIDE: tl.constexpr,
):
    """``s`` with -inf where a row does not see a key, by every rule of the call."""
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
        dense = tl.load(corner + i.to(tl.int64) * kv_len + j, mask=inside, other=0) != 0
        if seen is None:
            seen = dense
        else:
            seen = seen & dense
    if seen is not None:
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def finite_lse(lse, rows, q_len, shift):
    """Row sums in base 2 for the backward pass, less the shift of the logits.

    Rows that see nothing get +inf, so p = 0.
    """
    value = tl.load(lse + rows, mask=rows < q_len, other=float("inf")) * LOG2E - shift
    return tl.where(value == float("-inf"), float("inf"), value)
