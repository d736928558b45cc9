"""One tile of logits and its element mask, the same for forward and backward kernels.

``i`` and ``j`` are query and key indices shaped to broadcast to the tile, in either orientation:
``[rows, 1]`` and ``[1, columns]``, or transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.softmax import LOG2E, tanh_from_exp2
from ejkernel.kernels.triton.common.structure import visible


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
    scale,
    cap_in,
    cap_out,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Products to logits; returns (x, t) with t the tanh of a soft cap (else x again).

    x is in base 2 when SCALED; otherwise it is still to be multiplied by ``scale`` (which then
    contains log2 e). ``scale`` is natural when a bias is added. ``cap_in`` is 2 log2(e) / cap,
    times the scale when there is no bias; ``cap_out`` is cap * log2 e.
    """
    if bias is not None:
        corner = bias + b.to(tl.int64) * bias_batch + h.to(tl.int64) * bias_head
        # rows are reached in 64 bits once each; columns count within a row
        at = corner + i.to(tl.int64) * kv_len
        inside = (i < q_len) & (j < kv_len)
        s = s * scale + tl.load(at + j, mask=inside, other=0.0).to(tl.float32)
        if not CAPPED:
            s = s * LOG2E
    elif SCALED and not CAPPED:
        s = s * scale
    t = s
    if CAPPED:
        t = tanh_from_exp2(s * cap_in)
        s = t * cap_out
    return s, t


@triton.jit
def tile_seen(
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
):
    """Boolean tile: which keys each row sees, by every rule of the call."""
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
        i, j, q_len, kv_len, lo, hi, chunk, chunk_offset, q_id, kv_id, q_position, kv_position,
        position_lo, position_hi, HAS_LO, HAS_HI, POSITION_LO, POSITION_HI,
    )  # fmt: skip
    if mask is not None:
        corner = mask + b.to(tl.int64) * mask_batch + h.to(tl.int64) * mask_head
        inside = (i < q_len) & (j < kv_len)
        seen &= tl.load(corner + i.to(tl.int64) * kv_len + j, mask=inside, other=0) != 0
    return seen


@triton.jit
def finite_lse(lse, rows, q_len):
    """Row sums in base 2 for the backward pass; rows that see nothing get +inf, so p = 0."""
    value = tl.load(lse + rows, mask=rows < q_len, other=float("inf")) * LOG2E
    return tl.where(value == float("-inf"), float("inf"), value)
