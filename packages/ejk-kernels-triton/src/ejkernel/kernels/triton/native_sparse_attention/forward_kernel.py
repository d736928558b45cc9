"""The selected branch, forward.

Math, per token t and query head over the keys j <= t of the blocks selected for its key head (base
2 inside):

    x_tj = scale * q_t . k_j;  lse_t = log(sum_j exp x_tj);  o_t = sum_j exp(x_tj - lse_t) v_j

Work split: one program per (token, batch row, key head). The group's query heads are the rows of
its products, so they share every key that is read (groups of more heads than a tile has rows are
split). Programs of one key head follow each other: its keys and values stay in the L2 cache. The
other branches are added here: a pass of its own would take 0.38 ms.

Bound: each program reads ``blocks * size * (d + dv)`` elements and shares none with its neighbours.
At T 32k, 64:4 heads, D128, 16 blocks of 64: 69 GB from L2, 1.1 TFLOP: L2, by a factor of four. It
takes 6.8 ms on an H200.

Source: Yuan et al., "Native Sparse Attention" (2025), sections 3.3 and 3.4.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


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
def open_walk(chosen, starts, of):
    """What a program walks: (its token, first row of its key head, first token of its sequence, its
    list with -1 behind all blocks, how many there are, rows of its heads in ``[b, s, h]``, which
    exist)."""
    if of.some is None:
        t, b, hk, split = token_of(tl.program_id(0), of.length, of.kv_heads, of.SPLITS)
    else:
        t, b, hk, split = token_of(tl.program_id(0), of.length, of.some, of.SPLITS)
        hk += of.last - of.some
    token = b.to(tl.int64) * of.length + t
    start = 0
    if starts is not None:
        start = tl.load(starts + token)
    slot = tl.arange(0, of.SLOTS)
    row = token * of.kv_heads + hk
    entries = tl.load(chosen + row * of.slots + slot, mask=slot < of.slots, other=-1)
    count = tl.sum((entries >= 0).to(tl.int32), 0)
    each = split * of.ROWS + tl.arange(0, of.ROWS)
    inside = each < of.GROUP
    at = token * of.heads + hk * of.GROUP + each
    key_row = b.to(tl.int64) * of.length * of.kv_heads + hk
    return t, key_row, start, entries, count, at, inside


@triton.jit
def steps_of(count, phase: tl.constexpr, of):
    """Steps of a phase of a walk: 0 the first block of its list, 1 the others.

    Only a token's own block has keys behind it, and is the first if it is in the list. Every other
    tile goes without a mask. With one phase all have it.
    """
    own = tl.minimum(count, 1) * of.PARTS
    if of.PHASES == 1:
        begin, end = 0, count * of.PARTS
    elif phase == 0:
        begin, end = 0, own
    else:
        begin, end = own, count * of.PARTS
    return begin, end


@triton.jit
def tile_of(entries, step, start, t, phase: tl.constexpr, of):
    """A step of token t's walk: (first token of the tile, keys of its block that t sees).

    The list is in registers: as a load it would be one more stage, that keys and values then lack.
    """
    slot = tl.arange(0, of.SLOTS)
    block = tl.sum(tl.where(slot == step // of.PARTS, entries, 0), 0)
    into = step % of.PARTS * of.KEYS
    first = start + block * of.size + into
    within = tl.arange(0, of.KEYS)
    seen = within < of.size - into
    if phase == 0:
        seen = seen & (within <= t - first)
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
def load_seen(
    x, row, first, seen, D: tl.constexpr, COLUMNS: tl.constexpr, phase: tl.constexpr, of
):  # fmt: skip
    """The same of keys that are seen, in a phase of a walk."""
    if phase == 1 and of.EVEN and COLUMNS == D:
        stride = of.kv_heads * D
        pointers = x + row * D + first.to(tl.int64) * stride
        each = tl.arange(0, seen.shape[0])[:, None]
        tile = tl.load(pointers + each * stride + tl.arange(0, COLUMNS)[None, :])
    else:
        tile = load_head(x, row, first, seen, of.kv_heads, D, COLUMNS)
    return tile


@triton.jit
def open_step(q_tile, k, v, key_row, entries, step, start, t, phase: tl.constexpr, of):
    """Of a step of a phase: (which keys are seen, keys, values, products with the queries)."""
    first, seen = tile_of(entries, step, start, t, phase, of)
    k_tile = load_seen(k, key_row, first, seen, of.D, of.COLUMNS, phase, of)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=of.PRECISION)
    if of.sign is not None:
        s = s * of.sign
    v_tile = load_seen(v, key_row, first, seen, of.DV, of.VALUE_COLUMNS, phase, of)
    return seen, k_tile, v_tile, s


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
def under_gate(o, gate, at, inside):
    """Rows in float32 times their gates, None = 1."""
    o = o.to(tl.float32)
    if gate is not None:
        o *= tl.load(gate + at, mask=inside, other=0.0)[:, None]
    return o


@triton.jit
def selected_fwd(
    q,
    k,
    v,
    chosen,
    starts,
    o_cmp,
    o_swa,
    g_cmp,
    g_slc,
    g_swa,
    o,
    base,
    rest,
    total,
    of,
):
    """o ``[b, s, h, dv]``; base and rest ``[b, s, h]``, as of ``row_terms``; all three or none.

    ``total [b, s, h, dv]``: the sum of o and the other branches' under their gates ``[b, s, h]``;
    None = not asked for, no such branch, no such gate.
    ``chosen [b, s, hk, slots]``; ``starts [b, s]``: first token of a token's sequence, None = 0.
    """
    t, key_row, start, entries, count, at, inside = open_walk(chosen, starts, of)
    q_tile = load_group(q, at, inside, 0, of.D, of.COLUMNS)
    m = tl.full([of.ROWS], float("-inf"), tl.float32)
    # of columns: a row is spread over warps, and summed up once
    sums = tl.zeros([of.ROWS, of.KEYS], tl.float32)
    acc = tl.zeros([of.ROWS, of.VALUE_COLUMNS], tl.float32)
    for phase in tl.static_range(of.PHASES):
        begin, end = steps_of(count, phase, of)
        for step in tl.range(begin, end):
            seen, _, v_tile, s = open_step(
                q_tile, k, v, key_row, entries, step, start, t, phase, of
            )  # fmt: skip
            if phase == 0 or not of.EVEN:
                s = tl.where(seen[None, :], s, float("-inf"))
            # the first tile of every block has a key that is seen
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2((s - m_new[:, None]) * of.slope)
            alpha = tl.exp2((m - m_new) * of.slope)[:, None]
            sums = sums * alpha + p
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha, input_precision=of.PRECISION)
            m = m_new

    l = tl.sum(sums, 1)  # noqa: E741
    if o is not None:
        top, low = row_terms(m, l)
        tl.store(base + at, top, mask=inside)
        tl.store(rest + at, low, mask=inside)
    acc = acc / tl.where(l > 0.0, l, 1.0)[:, None]
    column = tl.arange(0, of.VALUE_COLUMNS)
    stored = inside[:, None] & (column < of.DV)[None, :]
    each = at[:, None] * of.DV + column[None, :]
    own = acc.to(q.dtype.element_ty)
    if o is not None:
        tl.store(o + each, own, mask=stored)
    if total is not None:
        acc = under_gate(own, g_slc, at, inside)
        if o_cmp is not None:
            other = load_group(o_cmp, at, inside, 0, of.DV, of.VALUE_COLUMNS)
            acc += under_gate(other, g_cmp, at, inside)
        if o_swa is not None:
            other = load_group(o_swa, at, inside, 0, of.DV, of.VALUE_COLUMNS)
            acc += under_gate(other, g_swa, at, inside)
        tl.store(total + each, acc.to(total.dtype.element_ty), mask=stored)
