"""One tile of logits and what of it is seen, the same for forward and backward kernels.

``i`` and ``j`` are query and key indices shaped to broadcast to the tile, in either orientation:
``[rows, 1]`` and ``[1, columns]``, or transposed.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.softmax import capped_weight
from ejkernel.kernels.triton.common.structure import (
    band_blocks,
    first_visit,
    given_blocks,
    in_order,
    visible,
)
from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def program_of(walk, heads):
    """(block, batch row, head) of this program, see ``Walk``.

    Blocks of one head follow each other, so that its keys stay in the L2 cache; where rows or
    heads share a bias, the programs that read the same part of it do.
    """
    pid = tl.program_id(0)
    if walk.order is not None:
        pid = in_order(walk.order, pid, walk.blocks * heads, walk.batch_step)
    if walk.NEIGHBOURS == 1:
        b = pid % walk.batch
        block = (pid // walk.batch) % walk.blocks
        h = pid // (walk.batch * walk.blocks)
    elif walk.NEIGHBOURS == 2:
        h = pid % heads
        block = (pid // heads) % walk.blocks
        b = pid // (heads * walk.blocks)
    else:
        block = pid % walk.blocks
        bh = pid // walk.blocks
        b = bh // heads
        h = bh % heads
    if walk.LAST_FIRST:
        block = walk.blocks - 1 - block
    return block, b, h


@triton.jit
def key_blocks(walk, row, first, sizes, rules, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Which blocks of keys the rows from ``first`` on visit: by a list, ranges or the band.

    (start, full_start, full_stop, stop) as ``band_blocks``, then of a list where its blocks start
    and the first of them. ``row``: of the list or the ranges.
    """
    if walk.listed is not None:
        visit, block, full_stop, stop = first_visit(walk.listed, row, sizes.kv_len, BLOCK_KV)
        return 0, 0, full_stop, stop, visit, block
    elif walk.ranges is not None:
        start, full_start, full_stop, stop = given_blocks(walk.ranges, row)
        return start, full_start, full_stop, stop, None, None
    else:
        last = tl.minimum(first + BLOCK_Q, sizes.q_len) - 1
        start, full_start, full_stop, stop = band_blocks(
            first, last, sizes.kv_len, rules.lo, rules.hi, BLOCK_KV
        )
        return start, full_start, full_stop, stop, None, None


@triton.jit
def load_bias(
    bias,
    i,
    j,
    i0,
    j0,
    b,
    h,
    sizes,
    TRANSPOSED: tl.constexpr,
    ROWS_INSIDE: tl.constexpr,
    KEYS_INSIDE: tl.constexpr,
):
    """A tile of the bias, None without one; i0 and j0 are the first of ``i`` and ``j``.

    KEYS_INSIDE: every j is a key; what is not reads as 0. So do rows past the last unless
    ROWS_INSIDE, which is also for kernels whose rows do not meet: those of another head, or the
    last again, are not stored.
    """
    if bias is None:
        more = None
    elif bias.TMA:
        more = bias.array.load([b * bias.batch + h * bias.head + i0, j0])
        if not ROWS_INSIDE:
            more = tl.where((i < sizes.q_len)[:, None], more, 0.0)
    else:
        # rows are reached in 64 bits once each; columns count within a row
        row = b * bias.batch + h * bias.head + tl.minimum(i, sizes.q_len - 1)
        at = bias.array + row.to(tl.int64)[:, None] * sizes.kv_len
        j = j[None, :]
        if KEYS_INSIDE:
            more = tl.load(at + j)
        else:
            more = tl.load(at + j, mask=j < sizes.kv_len, other=0.0)
    if TRANSPOSED and bias is not None:
        more = tl.trans(more)
    return more


@triton.jit
def tile_logits(s, more, logits):
    """Products to logits x in base 2, up to what a softmax adds: x = slope * s + shift.

    ``slope`` and ``shift`` are numbers of the call. A bias ``more`` is added to products times
    ``scale``: in its own units, where a finite one stays finite. Without one ``scale`` is a sign,
    or None: such a product is exact. With a soft cap s is ``capped_weight`` of what ``cap``
    multiplies.
    """
    if more is not None:
        # not a sum, which would become the start of the product and wait for the bias
        s = tl.fma(s, logits.scale, more.to(tl.float32))
    elif logits.scale is not None:
        s = s * logits.scale
    if logits.cap is not None:
        s = capped_weight(s * logits.cap)
    return s


@triton.jit
def cap_slope(w):
    """(1 - tanh^2) / -4 for w of ``capped_weight``."""
    return tl.fma(w, w, w)


@triton.jit
def mask_unseen(s, i, j, j0, b, h, sizes, rules, KEYS_INSIDE: tl.constexpr):
    """``s`` with -inf where a row does not see a key, by every rule of the call.

    ``j0``: the first of ``j``.
    """
    q_id, kv_id = load_pairs(rules.segments, i, j, b, sizes, -1, -2)
    q_position, kv_position = load_pairs(rules.positions, i, j, b, sizes, 0, 0)
    seen = visible(i, j, sizes.kv_len, rules, q_id, kv_id, q_position, kv_position, KEYS_INSIDE)
    mask = rules.mask
    if mask is not None:
        corner = mask.array + b.to(tl.int64) * mask.batch + h.to(tl.int64) * mask.head
        row = (i // mask.ROWS).to(tl.int64)
        if rules.mask.WORD:  # as a field it is a constant still
            # one for each row of the tile, where elements would be read one by one
            at = row * tl.cdiv(sizes.kv_len, mask.WORD) + j0 // mask.WORD
            word = tl.load(corner + at, mask=i < sizes.q_len, other=0)
            dense = (word & (1 << ((j - j0 + j0 % mask.KEYS) // mask.KEYS))) != 0
        else:
            inside = (i < sizes.q_len) & (j < sizes.kv_len)
            at = row * tl.cdiv(sizes.kv_len, mask.KEYS) + j // mask.KEYS
            dense = tl.load(corner + at, mask=inside, other=0) != 0
        if seen is None:
            seen = dense
        else:
            seen = seen & dense
    if seen is not None:
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def load_pairs(pairs, i, j, b, sizes, NO_ROW: tl.constexpr, NO_KEY: tl.constexpr):
    """Values of the queries ``i`` and the keys ``j``, None without ``pairs``."""
    if pairs is None:
        return None, None
    else:
        q_row = pairs.q + b * pairs.stride * sizes.q_len
        kv_row = pairs.kv + b * pairs.stride * sizes.kv_len
        q = tl.load(q_row + i, mask=i < sizes.q_len, other=NO_ROW)
        return q, tl.load(kv_row + j, mask=j < sizes.kv_len, other=NO_KEY)


@triton.jit
def probabilities(s, row_base, logits):
    """exp2 of logits less lse, which the forward kernel gives in the units of s.

    Their difference is scaled, not they: so the largest logit gives the same in both kernels,
    however large it is. FUSED: logits are bounded by a soft cap, and one instruction does both;
    then lse is in base 2.
    """
    if logits.FUSED:
        p = tl.exp2(s * logits.slope - row_base)
    else:
        p = tl.exp2((s - row_base) * logits.slope)
    return p


@triton.jit
def load_rows(values, i, length, EMPTY: tl.constexpr, EVEN: tl.constexpr):
    """Float32 of the rows ``i``, EMPTY past the last; EVEN: none is."""
    if EVEN:
        row = tl.load(values + i)
    else:
        row = tl.load(values + i, mask=i < length, other=EMPTY)
    return row
