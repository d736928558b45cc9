"""The selected branch, backward: the gradient of queries.

With p_tj = exp(x_tj - lse_t) and delta_t = do_t . o_t:

    ds_tj = p_tj (do_t . v_j - delta_t);    dq_t = scale * sum_j ds_tj k_j

Work split and bound as of the forward pass, whose walk this is, with three products a tile: 7.6
ms.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import (
    load_group,
    load_seen,
    open_walk,
    steps_of,
    tile_of,
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
    t, key_row, start, entries, count, at, inside, q_tile = open_walk(q, chosen, starts, of)
    do_tile = load_group(do, at, inside, 0, of.DV, of.VALUE_COLUMNS)
    row_base = tl.load(base + at, mask=inside, other=0.0)[:, None]
    row_rest = tl.load(rest + at, mask=inside, other=float("inf"))[:, None]
    row_delta = tl.load(delta + at, mask=inside, other=0.0)[:, None]

    acc = tl.zeros([of.ROWS, of.COLUMNS], tl.float32)
    for phase in tl.static_range(of.PHASES):
        begin, end = steps_of(count, phase, of)
        for step in tl.range(begin, end):
            first, seen = tile_of(entries, step, start, t, phase, of)
            whole: tl.constexpr = phase == 1 and of.EVEN
            k_tile = load_seen(k, key_row, first, seen, of.kv_heads, of.D, of.COLUMNS, whole)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=of.PRECISION)
            if of.sign is not None:
                s = s * of.sign
            v_tile = load_seen(
                v, key_row, first, seen, of.kv_heads, of.DV, of.VALUE_COLUMNS, whole
            )  # fmt: skip
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=of.PRECISION)
            p = weights(s, row_base, row_rest, of.slope)
            ds = p * (dp - row_delta)
            if not whole:
                ds = tl.where(seen[None, :], ds, 0.0)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=of.PRECISION)

    column = tl.arange(0, of.COLUMNS)
    stored = inside[:, None] & (column < of.D)[None, :]
    pointers = dq + at[:, None] * of.D + column[None, :]
    tl.store(pointers, (acc * of.scale).to(dq.dtype.element_ty), mask=stored)
