"""A tile of query rows against one block of cached keys and values: the step every walk shares.

The rows' state is (m, l, e, acc): the largest logit, the sum and the weighted values relative to
it, and what ``fused_softmax`` carries along.
An 8-bit cache is read two columns at a time (``common.eight_bit``): even and odd columns meet even
and odd columns of the queries, and have accumulators of their own. A head dim held as two powers of
two has a second part of everything; what a call does not have is passed through as it came.

Logits are products times a positive slope for each row; a scale's sign is the queries', exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.eight_bit import pair_numbers, whole_numbers
from ejkernel.kernels.triton.common.pages import load_places
from ejkernel.kernels.triton.common.softmax import fused_softmax, online_softmax, tanh_from_exp2
from ejkernel.kernels.triton.launch import RUNS as _RUNS

RUNS = tl.constexpr(_RUNS)


@triton.jit
def _load_queries(q, rows, inside, D: tl.constexpr, COLUMN: tl.constexpr, COLS: tl.constexpr):
    """Columns COLUMN .. COLUMN + COLS of int64 ``rows`` of ``[., D]``; 0 where not inside."""
    column = COLUMN + tl.arange(0, COLS)
    mask = inside[:, None] & (column < D)[None, :]
    return tl.load(q + rows[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def _prepared(
    q, q_more, factor, cap_in, cap_out,
    QK: tl.constexpr, NORMALISE: tl.constexpr, CAPPED: tl.constexpr, REST: tl.constexpr,
    POSITIVE: tl.constexpr,
):  # fmt: skip
    """(q, q_more, slopes, inner) of products times ``factor``: queries in the dtype of products.

    inner: slopes inside the soft cap. NORMALISE: any query fits float16 once its largest entry is
    near 1; slopes take the rest. POSITIVE: so is the factor, and queries stay as they are loaded:
    products then read them where they lie.
    """
    slopes = tl.full([q.shape[0]], 1.0, tl.float32) * tl.abs(factor)
    if not POSITIVE:
        sign = tl.where(factor > 0.0, 1.0, tl.where(factor < 0.0, -1.0, 0.0))
        q = q.to(tl.float32) * sign
        if REST > 0:
            q_more = q_more.to(tl.float32) * sign
    if NORMALISE:
        q = q.to(tl.float32)
        if REST > 0:
            q_more = q_more.to(tl.float32)
        size = tl.max(tl.abs(q), 1)
        if REST > 0:
            size = tl.maximum(size, tl.max(tl.abs(q_more), 1))
        power, inverse = power_of_two(size)
        q = q * inverse[:, None]
        if REST > 0:
            q_more = q_more * inverse[:, None]
        slopes = slopes * power
    slopes = tl.maximum(slopes, 2.0**-120)
    inner = slopes * cap_in
    if CAPPED:
        slopes = slopes * 0.0 + cap_out
    if REST > 0:
        q_more = q_more.to(QK)
    return q.to(QK), q_more, slopes, inner


@triton.jit
def _even_odd(q, KIND: tl.constexpr):
    """What meets the cache: all columns (twice), or the even and the odd ones of an 8-bit cache."""
    if KIND == "":
        even, odd = q, q
    else:
        even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def opened(
    q, rows, inside, factor, cap_in, cap_out,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    QK: tl.constexpr, K_KIND: tl.constexpr,
    NORMALISE: tl.constexpr, CAPPED: tl.constexpr, POSITIVE: tl.constexpr,
):  # fmt: skip
    """What ``attend_block`` wants of int64 ``rows`` of q ``[., D]``, 0 where not inside.

    (q, q_odd, q_more, q_more_odd, slopes, inner) of products times ``factor``.
    """
    q_main = _load_queries(q, rows, inside, D, 0, D_MAIN)
    q_more = q_main
    if D_REST > 0:
        q_more = _load_queries(q, rows, inside, D, D_MAIN, D_REST)
    q_main, q_more, slopes, inner = _prepared(
        q_main, q_more, factor, cap_in, cap_out, QK, NORMALISE, CAPPED, D_REST, POSITIVE
    )
    q_main, q_main_odd = _even_odd(q_main, K_KIND)
    q_more_odd = q_main_odd
    if D_REST > 0:
        q_more, q_more_odd = _even_odd(q_more, K_KIND)
    return q_main, q_main_odd, q_more, q_more_odd, slopes, inner


@triton.jit
def opened_as_loaded(
    q, rows, inside, factor, cap_in, cap_out,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The same with the factor's sign at the end: queries stay as they are loaded.

    An asynchronous product reads such queries from shared memory; any arithmetic would move them to
    registers.
    """
    q_main = _load_queries(q, rows, inside, D, 0, D_MAIN)
    q_more = q_main
    if D_REST > 0:
        q_more = _load_queries(q, rows, inside, D, D_MAIN, D_REST)
    one = tl.full([q_main.shape[0]], 1.0, tl.float32)
    sign = one * tl.where(factor > 0.0, 1.0, tl.where(factor < 0.0, -1.0, 0.0))
    slopes = tl.maximum(one * tl.abs(factor), 2.0**-120)
    inner = slopes * cap_in
    if CAPPED:
        slopes = one * cap_out
    return q_main, q_main, q_more, q_more, slopes, inner, sign


@triton.jit
def empty(ROWS: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr, V_KIND: tl.constexpr):
    """The state before any key: (m, l, acc, acc_odd, acc_more, acc_more_odd)."""
    # an 8-bit cache has its even and odd columns in accumulators of their own
    HALVES: tl.constexpr = 1 if V_KIND == "" else 2
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, DV_MAIN // HALVES], tl.float32)
    acc_more = acc
    if DV_REST > 0:
        acc_more = tl.zeros([ROWS, DV_REST // HALVES], tl.float32)
    return m, l, acc, acc, acc_more, acc_more


@triton.jit
def joined(acc, acc_odd, acc_more, acc_more_odd, DV_REST: tl.constexpr, V_KIND: tl.constexpr):
    """Both parts of the sums, even and odd columns side by side again."""
    if V_KIND != "":
        acc = tl.interleave(acc, acc_odd)
        if DV_REST > 0:
            acc_more = tl.interleave(acc_more, acc_more_odd)
    return acc, acc_more


@triton.jit
def power_of_two(x):
    """(p, 1 / p) with p the power of two at or below x > 0; (1, 1) where x is 0, tiny or huge."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits < 0x08000000) | (bits > 0x77000000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(tile, KIND: tl.constexpr, ONCE: tl.constexpr, NUMBER: tl.constexpr, PTX: tl.constexpr):
    """(even, odd) of a tile as it was read: the same twice, or even and odd columns of KIND."""
    if ONCE is not None:
        even = whole_numbers(tile, ONCE, NUMBER, PTX)
        odd = even
    elif KIND != "":
        even, odd = pair_numbers(tile, KIND, PTX)
    else:
        even, odd = tile, tile
    return even, odd


@triton.jit
def _columns(
    cache, places, loaded, run, head,
    HEADS: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
    COLUMN: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
    ONCE: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Columns from COLUMN on as ``even_odd`` has them: all of them twice, or even and odd ones."""
    EACH: tl.constexpr = 1 if KIND == "" and ONCE is None else 2  # numbers that are read as one
    if run is not None:
        tile = cache.load([run[0], (head * STEP + COLUMN) // EACH])
    else:
        tile = load_places(
            cache, places, loaded, head, HEADS, STEP // EACH, DIM // EACH, COLUMN // EACH,
            COLUMNS // EACH,
        )  # fmt: skip
    return _numbers(tile, KIND, ONCE, NUMBER, PTX)


@triton.jit
def _value_columns(
    cache, places, loaded, run, head,
    HEADS: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
    COLUMN: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
    ONCE: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """The same of values, which are 0 where they may not be read."""
    EACH: tl.constexpr = 1 if KIND == "" and ONCE is None else 2
    if run is not None:
        first = (head * STEP + STEP // 2 + COLUMN) // EACH
        tile = cache.load([RUNS, run[0] + run[1], -run[1] + RUNS, first])
        tile = tl.reshape(tile, [tile.shape[2], tile.shape[3]])
        even, odd = _numbers(tile, KIND, ONCE, NUMBER, PTX)
    else:
        even, odd = _columns(
            cache, places, loaded, None, head, HEADS, STEP, DIM, COLUMN, COLUMNS, KIND, PTX,
            ONCE, NUMBER,
        )  # fmt: skip
    return even, odd


@triton.jit
def _add_scores(
    s, q, q_odd, even, odd,
    NUMBER: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """s ``[rows, BLOCK]`` plus products of queries and columns of keys."""
    s = _add_product(s, q, even, NUMBER, PRECISION, APART)
    if KIND != "":
        s = _add_product(s, q_odd, odd, NUMBER, PRECISION, APART)
    return s


@triton.jit
def _add_product(s, q, k, NUMBER: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr):
    if APART:
        # the compiler would make a sum the next product's: a multiply-add it leaves alone
        zero = tl.zeros(s.shape, tl.float32)
        x = tl.dot(q, tl.trans(k.to(NUMBER)), zero, input_precision=PRECISION)
        s = tl.fma(x, zero + 1.0, s)
    else:
        s = tl.dot(q, tl.trans(k.to(NUMBER)), s, input_precision=PRECISION)
    return s


@triton.jit
def _add_values(
    acc, acc_odd, alpha, p, even, odd,
    NUMBER: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc * alpha plus p times columns of values; acc_odd as ``even_odd`` says."""
    acc = tl.dot(p, even.to(NUMBER), acc * alpha[:, None], input_precision=PRECISION)
    if KIND != "":
        acc_odd = tl.dot(p, odd.to(NUMBER), acc_odd * alpha[:, None], input_precision=PRECISION)
    return acc, acc_odd


@triton.jit
def _hide(s, j, position, left, loaded):
    """Logits of keys ``j`` that a row does not see to -inf; what is None hides nothing."""
    if loaded is not None:
        s = tl.where(loaded[None, :], s, float("-inf"))
    if position is not None:
        s = tl.where(j[None, :] <= position[:, None], s, float("-inf"))
        if left is not None:
            s = tl.where(j[None, :] >= position[:, None] - left, s, float("-inf"))
    return s


@triton.jit
def attend_block(
    q, q_odd, q_more, q_more_odd,
    m, l, e, acc, acc_odd, acc_more, acc_more_odd,  # noqa: E741
    slopes, inner, power, large,
    k, v, places, loaded, run, j, position, left, partly, head,
    K_HEADS: tl.constexpr, K_STEP: tl.constexpr, V_HEADS: tl.constexpr, V_STEP: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr,
    CAPPED: tl.constexpr, FUSED: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
    sign=None, apart=None, k_rest=None, ONCE=None,
):  # fmt: skip
    """The state after the keys ``j`` at ``places``.

    ``run``, where it is not None: (place of the first key, how many may be read); k and v are then
    descriptors of the cache's rows, v's one of runs (``launch.runs_map``).
    ``loaded [BLOCK]``: keys that may be read and are seen, None = all. A row at ``position`` (None:
    behind all keys) sees those up to itself, and ``left`` of them besides itself if that is given.
    ``partly``: whether some row does not see all of this block; None: it must be looked at anyway.
    ``power``, ``large``, e: of ``fused_softmax``, if FUSED. v None: the first part of a key is the
    value, DV columns, read once; with ``run`` k is then the descriptor of runs and ``k_rest`` that
    of the other columns. ``sign``: of the products' factor, None = the queries carry it. ONCE: the
    dtype of 8-bit numbers that are converted once for both products; KIND is then "".

    ``apart``: a truth that the compiler does not know to be one. Triton gives all warps to the rows
    of a product that leads to another, and rows that are too few it computes twice; it does not
    look into a branch, so what this one hides is cut along keys. None: not wanted.
    """
    s = tl.zeros([q.shape[0], j.shape[0]], tl.float32)
    if k_rest is None:
        k_rest = k
        even, odd = _columns(
            k, places, loaded, run, head, K_HEADS, K_STEP, D, 0, D_MAIN, K_KIND, PTX, ONCE, QK
        )
    else:
        even, odd = _value_columns(
            k, places, loaded, run, 0, K_HEADS, 0, D, 0, D_MAIN, K_KIND, PTX, ONCE, QK
        )
    s = _add_scores(s, q, q_odd, even, odd, QK, K_KIND, PRECISION, apart is not None)
    if D_REST > 0:
        more, more_odd = _columns(
            k_rest, places, loaded, run, head, K_HEADS, K_STEP, D, D_MAIN, D_REST, K_KIND, PTX,
            ONCE, QK,
        )  # fmt: skip
        s = _add_scores(
            s, q_more, q_more_odd, more, more_odd, QK, K_KIND, PRECISION, apart is not None
        )
    if sign is not None:
        s = s * sign[:, None]
    if CAPPED:
        s = tanh_from_exp2(s * inner[:, None])
    if partly is None:
        s = _hide(s, j, position, left, loaded)
    elif partly:
        s = _hide(s, j, position, left, loaded)
    if FUSED:
        p, m, l, e, alpha = fused_softmax(s, m, l, e, slopes, power, large, True)  # noqa: E741
    elif apart is None:
        p, m, l, alpha = online_softmax(s, m, l, slopes, True, True)  # noqa: E741
    else:
        p = s
        alpha = m
        if apart:
            p, m, l, alpha = online_softmax(s, m, l, slopes, True, True)  # noqa: E741
    p = p.to(PV)
    if v is not None:
        even, odd = _value_columns(
            v, places, loaded, run, head, V_HEADS, V_STEP, DV, 0, DV_MAIN, V_KIND, PTX, None, PV
        )
    acc, acc_odd = _add_values(acc, acc_odd, alpha, p, even, odd, PV, V_KIND, PRECISION)
    if DV_REST > 0:
        more, more_odd = _value_columns(
            v, places, loaded, run, head, V_HEADS, V_STEP, DV, DV_MAIN, DV_REST, V_KIND, PTX,
            None, PV,
        )  # fmt: skip
        acc_more, acc_more_odd = _add_values(
            acc_more, acc_more_odd, alpha, p, more, more_odd, PV, V_KIND, PRECISION
        )
    return m, l, e, acc, acc_odd, acc_more, acc_more_odd


@triton.jit
def store_rows(
    target, rows, acc, acc_more, inside,
    DV: tl.constexpr, DV_MAIN: tl.constexpr, DV_REST: tl.constexpr,
):  # fmt: skip
    """Both parts of every row to ``target [., DV]``; ``rows`` are int64 row numbers."""
    where = target + rows[:, None] * DV
    column = tl.arange(0, DV_MAIN)
    mask = inside[:, None] & (column < DV)[None, :]
    tl.store(where + column[None, :], acc.to(target.dtype.element_ty), mask=mask)
    if DV_REST > 0:
        column = DV_MAIN + tl.arange(0, DV_REST)
        mask = inside[:, None] & (column < DV)[None, :]
        tl.store(where + column[None, :], acc_more.to(target.dtype.element_ty), mask=mask)
