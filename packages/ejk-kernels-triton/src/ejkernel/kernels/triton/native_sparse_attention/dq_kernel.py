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
    load_keys,
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
    length,
    heads,
    kv_heads,
    slots,
    size,
    slope,
    scale,
    sign,
    D: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq ``[b, s, h, d]``; base, rest and delta ``[b, s, h]``."""
    t, key_row, row, start, count, at, inside, q_tile = open_walk(
        q, chosen, starts, length, heads, kv_heads, slots, D, COLUMNS, GROUP, ROWS, SPLITS, SLOTS
    )
    do_tile = load_group(do, at, inside, 0, DV, VALUE_COLUMNS)
    row_base = tl.load(base + at, mask=inside, other=0.0)[:, None]
    row_rest = tl.load(rest + at, mask=inside, other=float("inf"))[:, None]
    row_delta = tl.load(delta + at, mask=inside, other=0.0)[:, None]

    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    within = tl.arange(0, KEYS)
    for step in tl.range(0, count * PARTS):
        first, keys = block_tile(chosen, row, slots, step, start, size, KEYS, PARTS)
        seen = within <= t - first
        if not EVEN:
            seen = seen & (within < keys)
        k_tile = load_keys(k, key_row * D, first, seen, kv_heads * D, D, COLUMNS)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if sign is not None:
            s = s * sign
        v_tile = load_keys(v, key_row * DV, first, seen, kv_heads * DV, DV, VALUE_COLUMNS)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        p = weights(s, row_base, row_rest, slope)
        ds = tl.where(seen[None, :], p * (dp - row_delta), 0.0)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)

    column = tl.arange(0, COLUMNS)
    stored = inside[:, None] & (column < D)[None, :]
    pointers = dq + at[:, None] * D + column[None, :]
    tl.store(pointers, (acc * scale).to(dq.dtype.element_ty), mask=stored)
