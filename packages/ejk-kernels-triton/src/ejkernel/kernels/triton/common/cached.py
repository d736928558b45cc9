"""A tile of query rows against one block of cached keys and values: the step every walk shares.

The rows' state is (m, l, e, acc): the largest logit, the sum and the weighted values relative to
it, and what ``fused_softmax`` carries along.
An 8-bit cache is read two columns at a time (``common.eight_bit``): even and odd columns meet even
and odd columns of the queries, and have accumulators of their own. A head dim held as two powers of
two has a second part of everything; what a call does not have is passed through as it came.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.bound_launch import RUNS as _RUNS
from ejkernel.kernels.triton.common.eight_bit import biased_numbers, pair_numbers, whole_numbers
from ejkernel.kernels.triton.common.eight_bit_keys import add_scores, whole_scores
from ejkernel.kernels.triton.common.pages import load_places
from ejkernel.kernels.triton.common.softmax import (
    fused_softmax,
    online_softmax,
    rounded_softmax,
    tanh_from_exp2,
)
from ejkernel.kernels.triton.language import tl, triton

RUNS = tl.constexpr(_RUNS)


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
def _numbers(tile, side, PTX: tl.constexpr, BIASED: tl.constexpr):
    """(even, odd) of a tile as it was read: the same twice, or even and odd columns of KIND."""
    if BIASED:
        even, odd = biased_numbers(tile, PTX)
    elif side.ONCE is not None:
        even = whole_numbers(tile, side.ONCE, side.NUMBER, PTX)
        odd = even
    elif side.KIND != "":
        even, odd = pair_numbers(tile, side.KIND, PTX)
    else:
        even, odd = tile, tile
    return even, odd


@triton.jit
def _columns(array, side, keys, head, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns from COLUMN on as they are read."""
    # numbers that are read as one
    EACH: tl.constexpr = 1 if side.KIND == "" and side.ONCE is None else 2
    if keys.run is not None:
        tile = array.load([keys.run[0], (head * side.STEP + COLUMN) // EACH])
    else:
        tile = load_places(
            array, keys.places, keys.loaded, head, side.HEADS, side.STEP // EACH, side.DIM // EACH,
            COLUMN // EACH, COLUMNS // EACH,
        )  # fmt: skip
    return tile


@triton.jit
def _run_columns(array, side, keys, first):
    """The same by a descriptor of runs, from column ``first`` of a token on: 0 behind the run."""
    EACH: tl.constexpr = 1 if side.KIND == "" and side.ONCE is None else 2
    place, count = keys.run
    tile = array.load([RUNS, place + count, -count + RUNS, first // EACH])
    return tl.reshape(tile, [tile.shape[2], tile.shape[3]])


@triton.jit
def _value_columns(
    array, side, keys, head, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr
):
    """(even, odd) of columns of values, which are 0 where they may not be read."""
    if keys.run is not None:
        first = head * side.STEP + side.STEP // 2 + COLUMN
        tile = _run_columns(array, side, keys, first)
    else:
        tile = _columns(array, side, keys, head, COLUMN, COLUMNS)
    return _numbers(tile, side, PTX, False)


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
def _add_values(acc, acc_odd, alpha, taken, p, even, odd, side, PRECISION: tl.constexpr):
    """acc * alpha plus p times columns of values; acc_odd as ``_even_odd`` says.

    ``taken``: what else every column gets, None: nothing.
    """
    acc = tl.dot(p, even.to(side.NUMBER), _rescaled(acc, alpha, taken), input_precision=PRECISION)
    if side.KIND != "":
        acc_odd = _rescaled(acc_odd, alpha, taken)
        acc_odd = tl.dot(p, odd.to(side.NUMBER), acc_odd, input_precision=PRECISION)
    return acc, acc_odd


@triton.jit
def _rescaled(acc, alpha, taken):
    if taken is None:
        return acc * alpha[:, None]
    else:
        none = tl.zeros(acc.shape, tl.float32)
        return tl.fma(acc, alpha[:, None] + none, taken[:, None] + none)


@triton.jit
def _formed_scores(queries, tile, rest, side, keys, head, FORM: tl.constexpr, PTX: tl.constexpr):
    """float32 scores with keys whose first columns are ``tile``."""
    sums = add_scores(None, queries.main, queries.main_odd, tile, FORM, side.KIND, PTX)
    if side.REST > 0:
        tile = _columns(rest, side, keys, head, side.MAIN, side.REST)
        sums = add_scores(sums, queries.more, queries.more_odd, tile, FORM, side.KIND, PTX)
    return whole_scores(sums, FORM)


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
    rest = cache.k
    if cache.k_rest is None:
        tile = _columns(cache.k, cache.K, keys, head, 0, cache.K.MAIN)
    else:
        rest = cache.k_rest
        tile = _run_columns(cache.k, cache.K, keys, 0)
    if dots.FORM != "":
        s = _formed_scores(queries, tile, rest, cache.K, keys, head, dots.FORM, PTX)
        even, odd = _numbers(tile, cache.K, PTX, dots.BIASED)
    else:
        even, odd = _numbers(tile, cache.K, PTX, False)
        s = tl.zeros([queries.main.shape[0], keys.j.shape[0]], tl.float32)
        s = _add_scores(
            s, queries.main, queries.main_odd, even, odd, cache.K, dots.PRECISION, APART
        )
        if cache.K.REST > 0:
            tile = _columns(rest, cache.K, keys, head, cache.K.MAIN, cache.K.REST)
            more, more_odd = _numbers(tile, cache.K, PTX, False)
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
    taken = None
    if dots.BIASED:
        p, m, new, alpha = rounded_softmax(s, m, queries.slopes, cache.V.NUMBER)
        l = l * alpha + new  # noqa: E741
        taken = new * (-128.0 * 2.0**-24)
    elif dots.FUSED:
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
    acc, acc_odd = _add_values(acc, acc_odd, alpha, taken, p, even, odd, cache.V, dots.PRECISION)
    if cache.V.REST > 0:
        more, more_odd = _value_columns(v, cache.V, keys, head, cache.V.MAIN, cache.V.REST, PTX)
        acc_more, acc_more_odd = _add_values(
            acc_more, acc_more_odd, alpha, taken, p, more, more_odd, cache.V, dots.PRECISION
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
