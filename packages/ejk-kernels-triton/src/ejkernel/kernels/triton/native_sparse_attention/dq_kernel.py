"""The selected branch, backward: the gradient of queries.

With p_tj = exp(x_tj - lse_t) and delta_t = do_t . o_t:

    ds_tj = p_tj (do_t . v_j - delta_t);    dq_t = scale * sum_j ds_tj k_j

Work split and bound as of the forward pass, whose walk this is, with three products a tile: 7.8
ms.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import (
    block_tile,
    load_group,
    load_head,
    open_walk,
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
    t, key_row, row, start, count, at, inside, q_tile = open_walk(q, chosen, starts, of)
    do_tile = load_group(do, at, inside, 0, of.DV, of.VALUE_COLUMNS)
    row_base = tl.load(base + at, mask=inside, other=0.0)[:, None]
    row_rest = tl.load(rest + at, mask=inside, other=float("inf"))[:, None]
    row_delta = tl.load(delta + at, mask=inside, other=0.0)[:, None]

    acc = tl.zeros([of.ROWS, of.COLUMNS], tl.float32)
    for step in tl.range(0, count * of.PARTS):
        first, seen = block_tile(chosen, row, step, start, t, of)
        k_tile = load_head(k, key_row, first, seen, of.kv_heads, of.D, of.COLUMNS)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=of.PRECISION)
        if of.sign is not None:
            s = s * of.sign
        v_tile = load_head(v, key_row, first, seen, of.kv_heads, of.DV, of.VALUE_COLUMNS)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=of.PRECISION)
        p = weights(s, row_base, row_rest, of.slope)
        ds = tl.where(seen[None, :], p * (dp - row_delta), 0.0)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=of.PRECISION)

    column = tl.arange(0, of.COLUMNS)
    stored = inside[:, None] & (column < of.D)[None, :]
    pointers = dq + at[:, None] * of.D + column[None, :]
    tl.store(pointers, (acc * of.scale).to(dq.dtype.element_ty), mask=stored)
