"""The selected branch, forward.

Math, per token t and query head over the keys j <= t of the blocks selected for its key head (base
2 inside):

    x_tj = scale * q_t . k_j;  lse_t = log(sum_j exp x_tj);  o_t = sum_j exp(x_tj - lse_t) v_j

Work split: one program per (token, batch row, key head). The group's query heads are the rows of
its products, so they share every key that is read (groups of more heads than a tile has rows are
split). Programs of one key head follow each other: its keys and values stay in the L2 cache.

Bound: each program reads ``blocks * size * (d + dv)`` elements and shares none with its neighbours.
At T 32k, 64:4 heads, D128, 16 blocks of 64: 69 GB from L2, 1.1 TFLOP: L2, by a factor of four. It
takes 7.2 ms on an H200.

Source: Yuan et al., "Native Sparse Attention" (2025), sections 3.3 and 3.4.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.softmax import online_softmax


@triton.jit
def token_of(pid, length, kv_heads, SPLITS: tl.constexpr):
    """(token, batch row, key head, part of its group) of a program."""
    split = pid // length % SPLITS
    bh = pid // length // SPLITS
    return pid % length, bh // kv_heads, bh % kv_heads, split


@triton.jit
def load_group(x, at, inside, heads_at, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows ``[., COLUMNS]`` of ``x [b, s, h, D]``: heads ``heads_at`` of the int64 tokens ``at``
    (heads before them); 0 where not inside."""
    column = tl.arange(0, COLUMNS)
    pointers = x + (at + heads_at)[:, None] * D + column[None, :]
    mask = inside[:, None]
    if COLUMNS > D:
        mask = mask & (column < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def list_length(chosen, row, slots, SLOTS: tl.constexpr):
    """Entries of a list, whose end is marked by -1."""
    slot = tl.arange(0, SLOTS)
    entries = tl.load(chosen + row * slots + slot, mask=slot < slots, other=-1)
    return tl.sum((entries >= 0).to(tl.int32), 0)


@triton.jit
def open_walk(q, chosen, starts, of):
    """What a program walks: (its token, first row of its key head, the token's list, first token of
    its sequence, entries of the list, rows of its heads in ``[b, s, h]``, which exist, queries)."""
    t, b, hk, split = token_of(tl.program_id(0), of.length, of.kv_heads, of.SPLITS)
    token = b.to(tl.int64) * of.length + t
    row = token * of.kv_heads + hk
    start = 0
    if starts is not None:
        start = tl.load(starts + token)
    count = list_length(chosen, row, of.slots, of.SLOTS)
    each = split * of.ROWS + tl.arange(0, of.ROWS)
    inside = each < of.GROUP
    at = token * of.heads + hk * of.GROUP + each
    q_tile = load_group(q, at, inside, 0, of.D, of.COLUMNS)
    return t, b.to(tl.int64) * of.length * of.kv_heads + hk, row, start, count, at, inside, q_tile


@triton.jit
def block_tile(chosen, row, step, start, t, of):
    """Step ``step`` of token t's walk: (first token of the tile, keys of its block that t sees)."""
    block = tl.load(chosen + row * of.slots + step // of.PARTS)
    into = step % of.PARTS * of.KEYS
    first = start + block * of.size + into
    within = tl.arange(0, of.KEYS)
    seen = within <= t - first
    if not of.EVEN:
        seen = seen & (within < of.size - into)
    return first, seen


@triton.jit
def load_keys(x, base, first, inside, stride, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens from ``first`` on ``[., COLUMNS]`` of one key head; 0 where not inside."""
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, inside.shape[0])
    pointers = x + base + first.to(tl.int64) * stride + row[:, None] * stride + column[None, :]
    mask = inside[:, None]
    if COLUMNS > D:
        mask = mask & (column < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_head(x, row, first, inside, heads, D: tl.constexpr, COLUMNS: tl.constexpr):
    """The same of x ``[., heads, D]``, whose first token has its head at ``row``."""
    return load_keys(x, row * D, first, inside, heads * D, D, COLUMNS)


@triton.jit
def row_terms(m, l):  # noqa: E741
    """(base, rest): the largest product of a row, and log2 of the sum relative to it.

    Two numbers, since one would lose the sum beside a large product. Rows without keys have an
    infinite rest, which makes every probability 0.
    """
    alive = l > 0.0
    low = tl.where(alive, tl.log2(tl.where(alive, l, 1.0)), float("inf"))
    return tl.where(alive, m, 0.0), low


@triton.jit
def weights(s, base, rest, slope):
    """Probabilities of a tile of products; base and rest as of its rows."""
    return tl.exp2(tl.minimum((s - base) * slope, 0.0) - rest)


@triton.jit
def selected_fwd(
    q,
    k,
    v,
    chosen,
    starts,
    o,
    base,
    rest,
    of,
):
    """o ``[b, s, h, dv]``; base and rest ``[b, s, h]``, as of ``row_terms``.

    ``chosen [b, s, hk, slots]``; ``starts [b, s]``: first token of a token's sequence, None = 0.
    """
    t, key_row, row, start, count, at, inside, q_tile = open_walk(q, chosen, starts, of)
    m = tl.full([of.ROWS], float("-inf"), tl.float32)
    l = tl.zeros([of.ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([of.ROWS, of.VALUE_COLUMNS], tl.float32)
    for step in tl.range(0, count * of.PARTS):
        first, seen = block_tile(chosen, row, step, start, t, of)
        k_tile = load_head(k, key_row, first, seen, of.kv_heads, of.D, of.COLUMNS)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=of.PRECISION)
        if of.sign is not None:
            s = s * of.sign
        s = tl.where(seen[None, :], s, float("-inf"))
        v_tile = load_head(v, key_row, first, seen, of.kv_heads, of.DV, of.VALUE_COLUMNS)
        # the first tile of every block has a key that is seen
        p, m, l, alpha = online_softmax(s, m, l, of.slope, False, False)  # noqa: E741
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=of.PRECISION)

    acc = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    column = tl.arange(0, of.VALUE_COLUMNS)
    stored = inside[:, None] & (column < of.DV)[None, :]
    tl.store(o + at[:, None] * of.DV + column[None, :], acc.to(o.dtype.element_ty), mask=stored)
    top, low = row_terms(m, l)
    tl.store(base + at, top, mask=inside)
    tl.store(rest + at, low, mask=inside)
