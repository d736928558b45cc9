"""The selected branch, backward: the gradient of queries.

With p_tj = exp(x_tj - lse_t) and delta_t = do_t . o_t:

    ds_tj = p_tj (do_t . v_j - delta_t);    dq_t = scale * sum_j ds_tj k_j

Work split and bound as of the forward pass, whose walk this is, with three products a tile: 7.6
ms. Where there is memory for it, the pass of key gradients, which has ds, keeps it: that leaves one
product, and half of what is read from L2: 3.5 ms.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import (
    load_group,
    load_seen,
    open_step,
    open_walk,
    steps_of,
    tile_of,
    token_of,
    weights,
)


@triton.jit
def selected_dq(
    q,
    k,
    v,
    chosen,
    starts,
    do,
    base,
    rest,
    delta,
    dq,
    of,
):
    """dq ``[b, s, h, d]``; base, rest and delta ``[b, s, h]``."""
    t, key_row, start, entries, count, at, inside = open_walk(chosen, starts, of)
    q_tile = load_group(q, at, inside, 0, of.D, of.COLUMNS)
    do_tile = load_group(do, at, inside, 0, of.DV, of.VALUE_COLUMNS)
    row_base = tl.load(base + at, mask=inside, other=0.0)[:, None]
    row_rest = tl.load(rest + at, mask=inside, other=float("inf"))[:, None]
    row_delta = tl.load(delta + at, mask=inside, other=0.0)[:, None]

    acc = tl.zeros([of.ROWS, of.COLUMNS], tl.float32)
    for phase in tl.static_range(of.PHASES):
        begin, end = steps_of(count, phase, of)
        for step in tl.range(begin, end):
            seen, k_tile, v_tile, s = open_step(
                q_tile, k, v, key_row, entries, step, start, t, phase, of
            )  # fmt: skip
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=of.PRECISION)
            p = weights(s, row_base, row_rest, of.slope)
            ds = p * (dp - row_delta)
            if phase == 0 or not of.EVEN:
                ds = tl.where(seen[None, :], ds, 0.0)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=of.PRECISION)

    column = tl.arange(0, of.COLUMNS)
    stored = inside[:, None] & (column < of.D)[None, :]
    pointers = dq + at[:, None] * of.D + column[None, :]
    tl.store(pointers, (acc * of.scale).to(dq.dtype.element_ty), mask=stored)


@triton.jit
def sum_dq(
    k,
    chosen,
    starts,
    ds,
    dq,
    of,
):
    """dq ``[b, s, some * GROUP, d]`` of ``ds [b, some, s * SLOTS, size, GROUP]``, which
    ``selected_dkv`` keeps."""
    t, key_row, start, entries, count, _, inside = open_walk(chosen, starts, of)
    _, b, hk, split = token_of(tl.program_id(0), of.length, of.some, of.SPLITS)
    member = split * of.ROWS + tl.arange(0, of.ROWS)
    row = ((b * of.some + hk).to(tl.int64) * of.length + t) * of.SLOTS
    ds += row * (of.size * of.GROUP) + member[:, None]
    at = ((b.to(tl.int64) * of.length + t) * of.some + hk) * of.GROUP + member
    acc = tl.zeros([of.ROWS, of.COLUMNS], tl.float32)
    for phase in tl.static_range(of.PHASES):
        begin, end = steps_of(count, phase, of)
        for step in tl.range(begin, end):
            first, seen = tile_of(entries, step, start, t, phase, of)
            k_tile = load_seen(k, key_row, first, seen, of.D, of.COLUMNS, phase, of)
            key = step // of.PARTS * of.size + step % of.PARTS * of.KEYS + tl.arange(0, of.KEYS)
            pointers = ds + key[None, :] * of.GROUP
            if phase == 1 and of.EVEN and of.GROUP == of.ROWS:
                share = tl.load(pointers)
            else:
                share = tl.load(pointers, mask=inside[:, None] & seen[None, :], other=0.0)
            acc = tl.dot(share, k_tile, acc)

    column = tl.arange(0, of.COLUMNS)
    stored = inside[:, None] & (column < of.D)[None, :]
    pointers = dq + at[:, None] * of.D + column[None, :]
    tl.store(pointers, (acc * of.scale).to(dq.dtype.element_ty), mask=stored)
