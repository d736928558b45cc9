"""The selected branch, backward: the gradients of keys and values.

With p and ds as in ``dq_kernel``, per key head and key j, summed over the query heads that share it
and the tokens t whose list has its block:

    dv_j = sum_t p_tj do_t;    dk_j = scale * sum_t ds_tj q_t

Work split: XLA sorts the lists by block (``lists.transposed``). One program per piece of a block's
list (``common.sequences``: blocks as sequences, entries as rows), for a tile of its keys. A step
takes a few tokens with all query heads of the group, on transposed tiles [keys, rows]. Lists differ
in length, pieces do not, however many tokens select a block. A second kernel adds the pieces of
every block in order: no atomics, the same bits every time.

Bound: 8 * tokens * slots * size * d FLOPs per query head, and q and do of a token once per entry of
its list. At T 32k, 64:4 heads, D128, 16 blocks of 64: 2.2 TFLOP, 17 GB: arithmetic. Takes
4.5 ms on an H200, 6.0 where it keeps ds (4.3 GB), the sums 0.1 ms, the sorted lists 0.3 at most.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.sequences import find_piece, pieces_of
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import (
    load_group,
    load_head,
    weights,
)


@triton.jit
def selected_dkv(
    q,
    k,
    v,
    places,
    bounds,
    first_tokens,
    do,
    base,
    rest,
    delta,
    dk_parts,
    dv_parts,
    ds,
    of,
):
    """Sums of pieces, float32 ``[b * some, pieces, PARTS * KEYS, .]``; some pieces have no entries
    and are not written. The key heads are the ``some`` before ``last``.

    ``places [b, hk, entries]`` by block, ``bounds [b, hk, blocks + 1]`` into them, ``first_tokens
    [b, blocks]`` None = one sequence. ``ds [b, some, s * SLOTS, size, GROUP]``: kept for
    ``sum_dq``; None = nothing.
    """
    part = tl.program_id(0) % of.PARTS
    piece = tl.program_id(0) // of.PARTS % of.pieces
    bh = tl.program_id(0) // of.PARTS // of.pieces
    b = bh // of.some
    hk = bh % of.some + of.last - of.some
    bounds += (b * of.kv_heads + hk).to(tl.int64) * (of.blocks + 1)
    places += (b * of.kv_heads + hk).to(tl.int64) * of.entries
    block, begin, end, tile = find_piece(bounds, of.blocks, of.entries, piece, of.LENGTH, of.LANES)
    begin = tl.maximum(begin, tile)
    # of.entries behind the last block select nothing
    end = tl.where(block < of.blocks, tl.minimum(end, tile + of.LENGTH), begin)
    if begin < end:
        first = block * of.size
        if first_tokens is not None:
            first = tl.load(first_tokens + b * of.blocks + block)
        first += part * of.KEYS
        within = tl.arange(0, of.KEYS)
        j = first + within
        inside = (part * of.KEYS + within < of.size) & (j < of.length)
        row = b.to(tl.int64) * of.length
        key_row = row * of.kv_heads + hk
        k_tile = load_head(k, key_row, first, inside, of.kv_heads, of.D, of.COLUMNS)
        v_tile = load_head(v, key_row, first, inside, of.kv_heads, of.DV, of.VALUE_COLUMNS)
        dk = tl.zeros([of.KEYS, of.COLUMNS], tl.float32)
        dv = tl.zeros([of.KEYS, of.VALUE_COLUMNS], tl.float32)
        each = tl.arange(0, of.TOKENS * of.MEMBERS)
        if ds is not None:
            ds_of_keys = ds + bh.to(tl.int64) * of.length * of.SLOTS * of.size * of.GROUP
            ds_of_keys += (part * of.KEYS + within[:, None]) * of.GROUP
        for at in tl.range(begin * of.SPLITS, end * of.SPLITS, of.TOKENS):
            step = at + each // of.MEMBERS  # of.SPLITS an entry, of of.MEMBERS of.heads each
            entry = step // of.SPLITS
            member = step % of.SPLITS * of.MEMBERS + each % of.MEMBERS
            valid = (member < of.GROUP) & (entry < end)
            place = tl.load(places + entry, mask=valid, other=0)
            t = (place.to(tl.uint32) // of.SLOTS).to(tl.int32)  # a shift
            if ds is not None:
                kept = place.to(tl.int64) * (of.size * of.GROUP) + member
            member += hk * of.GROUP
            head = (row + t) * of.heads
            q_tile = load_group(q, head, valid, member, of.D, of.COLUMNS)
            s = tl.dot(k_tile, tl.trans(q_tile), input_precision=of.PRECISION)
            if of.sign is not None:
                s = s * of.sign
            do_tile = load_group(do, head, valid, member, of.DV, of.VALUE_COLUMNS)
            row_base = tl.load(base + head + member, mask=valid, other=0.0)
            row_rest = tl.load(rest + head + member, mask=valid, other=float("inf"))
            row_delta = tl.load(delta + head + member, mask=valid, other=0.0)
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=of.PRECISION)
            seen = j[:, None] <= t[None, :]
            p = tl.where(seen, weights(s, row_base[None, :], row_rest[None, :], of.slope), 0.0)
            dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=of.PRECISION)
            share = (p * (dp - row_delta[None, :])).to(q_tile.dtype)
            dk = tl.dot(share, q_tile, dk, input_precision=of.PRECISION)
            if ds is not None:
                held = valid[None, :] if of.EVEN else valid[None, :] & inside[:, None]
                tl.store(ds_of_keys + kept[None, :], share, mask=held)

        out = (bh.to(tl.int64) * of.pieces + piece) * (of.PARTS * of.KEYS) + part * of.KEYS + within
        column = tl.arange(0, of.COLUMNS)
        tl.store(
            dk_parts + out[:, None] * of.D + column[None, :],
            dk * of.scale,
            mask=(column < of.D)[None, :],
        )
        column = tl.arange(0, of.VALUE_COLUMNS)
        tl.store(
            dv_parts + out[:, None] * of.DV + column[None, :], dv, mask=(column < of.DV)[None, :]
        )


@triton.jit
def _sum_pieces(
    parts, out, at, begin, end, step, target, inside,
    D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows ``at`` of pieces begin .. end of ``parts``, ``step`` rows each, to rows ``target``."""
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < D)[None, :]
    total = tl.zeros([at.shape[0], COLUMNS], tl.float32)
    row = at + begin.to(tl.int64) * step
    for _ in tl.range(begin, end):
        total += tl.load(parts + row[:, None] * D + column[None, :], mask=mask, other=0.0)
        row += step
    pointers = out + target[:, None] * D + column[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_pieces(
    dk_parts,
    dv_parts,
    bounds,
    first_tokens,
    last_tokens,
    dk,
    dv,
    of,
):
    """dk and dv ``[b, s, some, .]``, one tile of a block's keys a program.

    ``last_tokens [b, blocks]``: one past a block's last token, None = one sequence. Tokens of no
    sequence are not written.
    """
    part = tl.program_id(0) % of.PARTS
    block = tl.program_id(0) // of.PARTS % of.blocks
    bh = tl.program_id(0) // of.PARTS // of.blocks
    b = bh // of.some
    hk = bh % of.some
    bounds += (b * of.kv_heads + hk + of.last - of.some).to(tl.int64) * (of.blocks + 1)
    begin, end, _ = pieces_of(bounds, block, of.blocks, of.entries, of.LENGTH)
    first = block * of.size
    last = tl.minimum(first + of.size, of.length)
    if first_tokens is not None:
        first = tl.load(first_tokens + b * of.blocks + block)
        last = tl.load(last_tokens + b * of.blocks + block)
    j = part * of.KEYS + tl.arange(0, of.KEYS)
    inside = first + j < last
    at = bh.to(tl.int64) * of.pieces * (of.PARTS * of.KEYS) + j
    target = (b.to(tl.int64) * of.length + first + j) * of.some + hk
    step = of.PARTS * of.KEYS
    _sum_pieces(dk_parts, dk, at, begin, end, step, target, inside, of.D, of.COLUMNS)
    _sum_pieces(dv_parts, dv, at, begin, end, step, target, inside, of.DV, of.VALUE_COLUMNS)
