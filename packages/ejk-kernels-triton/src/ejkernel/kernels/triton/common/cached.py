"""A tile of query rows against one block of cached keys and values: the step every walk shares.

The rows' state is (m, l, e, acc): the largest logit, the sum and the weighted values relative to
it, and what ``fused_softmax`` carries along.
An 8-bit cache is read two columns at a time (``common.eight_bit``): even and odd columns meet even
and odd columns of the queries, and have accumulators of their own. A head dim held as two powers of
two has a second part of everything; what a call does not have is passed through as it came.

Logits are products times a positive slope for each row; a scale's sign is the queries', exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.eight_bit import pair_numbers, whole_numbers
from ejkernel.kernels.triton.common.pages import load_places
from ejkernel.kernels.triton.common.softmax import fused_softmax, online_softmax, tanh_from_exp2
from ejkernel.kernels.triton.launch import RUNS as _RUNS

RUNS = tl.constexpr(_RUNS)


class Queries(NamedTuple):
    """Rows of queries: both parts of their columns, as they meet even and odd columns of keys.

    ``slopes``: of their logits, ``inner`` inside the soft cap. ``sign``: of the products' factor,
    None = the queries carry it. ``power``, ``large``: of ``fused_softmax``.
    """

    main: Any
    main_odd: Any
    more: Any
    more_odd: Any
    slopes: Any
    inner: Any
    sign: Any
    power: Any
    large: Any


class Keys(NamedTuple):
    """The keys ``j`` of a block at ``places``.

    ``loaded [BLOCK]``: keys that may be read and are seen, None = all. ``run``, where it is not
    None: (place of the first key, how many may be read); arrays are then descriptors of the cache's
    rows, that of values one of runs (``launch.runs_map``). A row at ``position`` (None: behind all
    keys) sees those up to itself, and ``left`` of them besides itself if that is given.
    ``partly``: whether some row does not see all of this block; None: it must be looked at anyway.
    """

    j: Any
    places: Any
    loaded: Any
    run: Any
    position: Any
    left: Any
    partly: Any


@triton.jit
def _load_queries(q, rows, inside, D: tl.constexpr, COLUMN: tl.constexpr, COLS: tl.constexpr):
    """Columns COLUMN .. COLUMN + COLS of int64 ``rows`` of ``[., D]``; 0 where not inside."""
    column = COLUMN + tl.arange(0, COLS)
    mask = inside[:, None] & (column < D)[None, :]
    return tl.load(q + rows[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def _prepared(q, q_more, factor, logits, side, NORMALISE: tl.constexpr, POSITIVE: tl.constexpr):
    """(q, q_more, slopes, inner) of products times ``factor``: queries in the dtype of products.

    inner: slopes inside the soft cap. NORMALISE: any query fits float16 once its largest entry is
    near 1; slopes take the rest. POSITIVE: so is the factor, and queries stay as they are loaded:
    products then read them where they lie.
    """
    slopes = tl.full([q.shape[0]], 1.0, tl.float32) * tl.abs(factor)
    if not POSITIVE:
        sign = tl.where(factor > 0.0, 1.0, tl.where(factor < 0.0, -1.0, 0.0))
        q = q.to(tl.float32) * sign
        if side.REST > 0:
            q_more = q_more.to(tl.float32) * sign
    if NORMALISE:
        q = q.to(tl.float32)
        if side.REST > 0:
            q_more = q_more.to(tl.float32)
        size = tl.max(tl.abs(q), 1)
        if side.REST > 0:
            size = tl.maximum(size, tl.max(tl.abs(q_more), 1))
        power, inverse = power_of_two(size)
        q = q * inverse[:, None]
        if side.REST > 0:
            q_more = q_more * inverse[:, None]
        slopes = slopes * power
    slopes = tl.maximum(slopes, 2.0**-120)
    inner = slopes * logits.cap_in
    if logits.CAPPED:
        slopes = slopes * 0.0 + logits.cap_out
    if side.REST > 0:
        q_more = q_more.to(side.NUMBER)
    return q.to(side.NUMBER), q_more, slopes, inner


@triton.jit
def _even_odd(q, KIND: tl.constexpr):
    """What meets the cache: all columns (twice), or the even and the odd ones of an 8-bit cache."""
    if KIND == "":
        even, odd = q, q
    else:
        even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def opened(q, rows, inside, factor, logits, side, NORMALISE: tl.constexpr, POSITIVE: tl.constexpr):
    """Int64 ``rows`` of q, 0 where not inside, for keys of ``side`` and products by ``factor``."""
    main = _load_queries(q, rows, inside, side.DIM, 0, side.MAIN)
    more = main
    if side.REST > 0:
        more = _load_queries(q, rows, inside, side.DIM, side.MAIN, side.REST)
    main, more, slopes, inner = _prepared(main, more, factor, logits, side, NORMALISE, POSITIVE)
    main, main_odd = _even_odd(main, side.KIND)
    more_odd = main_odd
    if side.REST > 0:
        more, more_odd = _even_odd(more, side.KIND)
    power, _ = power_of_two(slopes)
    large = 1073741824.0 / slopes
    return Queries(main, main_odd, more, more_odd, slopes, inner, None, power, large)


@triton.jit
def opened_as_loaded(q, rows, inside, factor, logits, side, POSITIVE: tl.constexpr):
    """The same with the factor's sign at the end: queries stay as they are loaded.

    An asynchronous product reads such queries from shared memory; any arithmetic would move them to
    registers.
    """
    main = _load_queries(q, rows, inside, side.DIM, 0, side.MAIN)
    more = main
    if side.REST > 0:
        more = _load_queries(q, rows, inside, side.DIM, side.MAIN, side.REST)
    one = tl.full([main.shape[0]], 1.0, tl.float32)
    sign = None
    if not POSITIVE:
        sign = one * tl.where(factor > 0.0, 1.0, tl.where(factor < 0.0, -1.0, 0.0))
    slopes = tl.maximum(one * tl.abs(factor), 2.0**-120)
    inner = slopes * logits.cap_in
    if logits.CAPPED:
        slopes = one * logits.cap_out
    return Queries(main, main, more, more, slopes, inner, sign, None, None)


@triton.jit
def empty(side, ROWS: tl.constexpr):
    """The state before any key: m, l, and the sums, those of even and odd columns of both parts."""
    # an 8-bit cache has its even and odd columns in accumulators of their own
    HALVES: tl.constexpr = 1 if side.KIND == "" else 2
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, side.MAIN // HALVES], tl.float32)
    more = acc
    if side.REST > 0:
        more = tl.zeros([ROWS, side.REST // HALVES], tl.float32)
    return m, l, (acc, acc, more, more)


@triton.jit
def joined(sums, side):
    """Both parts of the sums, even and odd columns side by side again."""
    acc, acc_odd, more, more_odd = sums
    if side.KIND != "":
        acc = tl.interleave(acc, acc_odd)
        if side.REST > 0:
            more = tl.interleave(more, more_odd)
    return acc, more


@triton.jit
def power_of_two(x):
    """(p, 1 / p) with p the power of two at or below x > 0; (1, 1) where x is 0, tiny or huge."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits < 0x08000000) | (bits > 0x77000000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(tile, side, PTX: tl.constexpr):
    """(even, odd) of a tile as it was read: the same twice, or even and odd columns of KIND."""
    if side.ONCE is not None:
        even = whole_numbers(tile, side.ONCE, side.NUMBER, PTX)
        odd = even
    elif side.KIND != "":
        even, odd = pair_numbers(tile, side.KIND, PTX)
    else:
        even, odd = tile, tile
    return even, odd


@triton.jit
def _columns(
    array, side, keys, head, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr
):
    """Columns from COLUMN on as ``_even_odd`` has them: all of them twice, or even and odd ones."""
    # numbers that are read as one
    EACH: tl.constexpr = 1 if side.KIND == "" and side.ONCE is None else 2
    if keys.run is not None:
        tile = array.load([keys.run[0], (head * side.STEP + COLUMN) // EACH])
    else:
        tile = load_places(
            array, keys.places, keys.loaded, head, side.HEADS, side.STEP // EACH, side.DIM // EACH,
            COLUMN // EACH, COLUMNS // EACH,
        )  # fmt: skip
    return _numbers(tile, side, PTX)


@triton.jit
def _run_columns(array, side, keys, first, PTX: tl.constexpr):
    """The same by a descriptor of runs, from column ``first`` of a token on: 0 behind the run."""
    EACH: tl.constexpr = 1 if side.KIND == "" and side.ONCE is None else 2
    place, count = keys.run
    tile = array.load([RUNS, place + count, -count + RUNS, first // EACH])
    tile = tl.reshape(tile, [tile.shape[2], tile.shape[3]])
    return _numbers(tile, side, PTX)


@triton.jit
def _value_columns(
    array, side, keys, head, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr
):
    """The same of values, which are 0 where they may not be read."""
    if keys.run is not None:
        first = head * side.STEP + side.STEP // 2 + COLUMN
        even, odd = _run_columns(array, side, keys, first, PTX)
    else:
        even, odd = _columns(array, side, keys, head, COLUMN, COLUMNS, PTX)
    return even, odd


@triton.jit
def _add_scores(s, q, q_odd, even, odd, side, PRECISION: tl.constexpr, APART: tl.constexpr):
    """s ``[rows, BLOCK]`` plus products of queries and columns of keys."""
    s = _add_product(s, q, even, side.NUMBER, PRECISION, APART)
    if side.KIND != "":
        s = _add_product(s, q_odd, odd, side.NUMBER, PRECISION, APART)
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
def _add_values(acc, acc_odd, alpha, p, even, odd, side, PRECISION: tl.constexpr):
    """acc * alpha plus p times columns of values; acc_odd as ``_even_odd`` says."""
    acc = tl.dot(p, even.to(side.NUMBER), acc * alpha[:, None], input_precision=PRECISION)
    if side.KIND != "":
        acc_odd = tl.dot(
            p, odd.to(side.NUMBER), acc_odd * alpha[:, None], input_precision=PRECISION
        )
    return acc, acc_odd


@triton.jit
def _hide(s, keys):
    """Logits of keys that a row does not see to -inf; what is None hides nothing."""
    if keys.loaded is not None:
        s = tl.where(keys.loaded[None, :], s, float("-inf"))
    if keys.position is not None:
        s = tl.where(keys.j[None, :] <= keys.position[:, None], s, float("-inf"))
        if keys.left is not None:
            first = keys.position[:, None] - keys.left
            s = tl.where(keys.j[None, :] >= first, s, float("-inf"))
    return s


@triton.jit
def attend_block(
    queries, m, l, e, sums, cache, v, head, keys, logits, dots, PTX: tl.constexpr, apart=None  # noqa: E741
):  # fmt: skip
    """The state after ``keys`` of a head: (m, l, e, sums).

    e: of ``fused_softmax``, if FUSED. v None: the first part of a key is the value, read once; with
    a run ``cache.k`` is then the descriptor of runs and ``cache.k_rest`` that of other columns.

    ``apart``: a truth that the compiler does not know to be one. Triton gives all warps to the rows
    of a product that leads to another, and rows that are too few it computes twice; it does not
    look into a branch, so what this one hides is cut along keys. None: not wanted.
    """
    acc, acc_odd, acc_more, acc_more_odd = sums
    APART: tl.constexpr = apart is not None
    s = tl.zeros([queries.main.shape[0], keys.j.shape[0]], tl.float32)
    if cache.k_rest is None:
        rest = cache.k
        even, odd = _columns(cache.k, cache.K, keys, head, 0, cache.K.MAIN, PTX)
    else:
        rest = cache.k_rest
        even, odd = _run_columns(cache.k, cache.K, keys, 0, PTX)
    s = _add_scores(s, queries.main, queries.main_odd, even, odd, cache.K, dots.PRECISION, APART)
    if cache.K.REST > 0:
        more, more_odd = _columns(rest, cache.K, keys, head, cache.K.MAIN, cache.K.REST, PTX)
        s = _add_scores(
            s, queries.more, queries.more_odd, more, more_odd, cache.K, dots.PRECISION, APART
        )
    if queries.sign is not None:
        s = s * queries.sign[:, None]
    if logits.CAPPED:
        s = tanh_from_exp2(s * queries.inner[:, None])
    if keys.partly is None:
        s = _hide(s, keys)
    elif keys.partly:
        s = _hide(s, keys)
    if dots.FUSED:
        p, m, l, e, alpha = fused_softmax(  # noqa: E741
            s, m, l, e, queries.slopes, queries.power, queries.large, True
        )
    elif apart is None:
        p, m, l, alpha = online_softmax(s, m, l, queries.slopes, True, True)  # noqa: E741
    else:
        p = s
        alpha = m
        if apart:
            p, m, l, alpha = online_softmax(s, m, l, queries.slopes, True, True)  # noqa: E741
    p = p.to(cache.V.NUMBER)
    if v is not None:
        even, odd = _value_columns(v, cache.V, keys, head, 0, cache.V.MAIN, PTX)
    acc, acc_odd = _add_values(acc, acc_odd, alpha, p, even, odd, cache.V, dots.PRECISION)
    if cache.V.REST > 0:
        more, more_odd = _value_columns(v, cache.V, keys, head, cache.V.MAIN, cache.V.REST, PTX)
        acc_more, acc_more_odd = _add_values(
            acc_more, acc_more_odd, alpha, p, more, more_odd, cache.V, dots.PRECISION
        )
    return m, l, e, (acc, acc_odd, acc_more, acc_more_odd)


@triton.jit
def store_rows(target, rows, acc, acc_more, inside, side):
    """Both parts of every row, like values of ``side``; ``rows`` are int64 row numbers."""
    where = target + rows[:, None] * side.DIM
    column = tl.arange(0, side.MAIN)
    mask = inside[:, None] & (column < side.DIM)[None, :]
    tl.store(where + column[None, :], acc.to(target.dtype.element_ty), mask=mask)
    if side.REST > 0:
        column = side.MAIN + tl.arange(0, side.REST)
        mask = inside[:, None] & (column < side.DIM)[None, :]
        tl.store(where + column[None, :], acc_more.to(target.dtype.element_ty), mask=mask)
