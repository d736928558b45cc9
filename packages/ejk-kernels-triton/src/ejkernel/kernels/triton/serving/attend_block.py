"""Attention of a tile of query rows to one block of cached keys: a step of every mainloop.

The state of the rows is (m, l, e, acc): the largest logit, the sum and the weighted values relative
to it; e is the rounding term of ``fused_softmax``.
An 8-bit cache is read two columns at a time (``common.eight_bit``): even and odd columns are
multiplied with even and odd columns of the queries and have their own accumulators. A head dim
split into two powers of two has a tail of everything; unused tails are passed through unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.bound_launch import MAP_ROWS as _MAP_ROWS
from ejkernel.kernels.triton.common.eight_bit import (
    convert_biased_pairs,
    convert_pairs,
    convert_rows,
)
from ejkernel.kernels.triton.common.softmax import (
    fused_softmax,
    online_softmax,
    rounded_softmax,
    tanh_from_exp2,
)
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.serving.eight_bit_scores import add_scores, combine_scores
from ejkernel.kernels.triton.serving.pages import load_cache_rows

MAP_ROWS = tl.constexpr(_MAP_ROWS)


class TreeRows(NamedTuple):
    """Query rows that are nodes of a tree (``types.serving.tree``).

    Attributes:
        words, count: as in ``groups.Tree``.
        row: row of ``words`` of each query row.
        inside: whether there is one.
        at: position of each query row, as a window counts.
        before: tokens of the sequence before its new ones, which all rows see.
        start: first key of the block.
    """

    words: Any
    count: Any
    row: Any
    inside: Any
    at: Any
    before: Any
    start: Any


class Keys(NamedTuple):
    """The keys ``j`` of a block at ``cache_rows``.

    Attributes:
        loaded: ``[BLOCK]``, whether a key may be read and is visible; None: all.
        run: (cache row of the first key, number of keys that may be read), or None. With a run,
            arrays are descriptors of cache rows, for values a ragged one
            (``bound_launch.runs_map``).
        position: position of each query row, which sees the keys up to itself; None: all rows come
            after all keys.
        left: number of keys that a row sees before itself; None: all.
        partly: whether some row does not see all of this block; None: always apply the mask.
        tree: ``TreeRows``, where rows do not see all keys up to their own; else None.
    """

    j: Any
    cache_rows: Any
    loaded: Any
    run: Any
    position: Any
    left: Any
    partly: Any
    tree: Any


@triton.jit
def tree_rows(tree, row, inside, position, before):
    """Returns the ``TreeRows`` of query rows that are rows ``row`` of the call, in no block yet."""
    at = position
    if tree.positions is not None:
        at = tl.load(tree.positions + row, mask=inside, other=0)
    return TreeRows(tree.words, tree.count, row, inside, at, before, None)


@triton.jit
def rows_at_block(rows, start):
    """Returns the ``TreeRows`` at a block of keys; None stays None."""
    if rows is None:
        return None
    else:
        return TreeRows(
            rows.words, rows.count, rows.row, rows.inside, rows.at, rows.before, start
        )  # fmt: skip


@triton.jit
def init_state(layout, ROWS: tl.constexpr):
    """Returns the initial state: m, l, and accumulators of even and odd columns of both parts."""
    # even and odd columns of an 8-bit cache have separate accumulators
    HALVES: tl.constexpr = 1 if layout.KIND == "" else 2
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, layout.MAIN // HALVES], tl.float32)
    acc_tail = acc
    if layout.TAIL > 0:
        acc_tail = tl.zeros([ROWS, layout.TAIL // HALVES], tl.float32)
    return m, l, (acc, acc, acc_tail, acc_tail)


@triton.jit
def join_columns(sums, layout):
    """Returns both parts of the accumulators, with even and odd columns interleaved again."""
    acc, acc_odd, acc_tail, acc_tail_odd = sums
    if layout.KIND != "":
        acc = tl.interleave(acc, acc_odd)
        if layout.TAIL > 0:
            acc_tail = tl.interleave(acc_tail, acc_tail_odd)
    return acc, acc_tail


@triton.jit
def _convert_tile(tile, layout, PTX: tl.constexpr, BIASED: tl.constexpr):
    """Converts a loaded tile to (even, odd) columns; both are the whole tile unless it is 8-bit."""
    if BIASED:
        even, odd = convert_biased_pairs(tile, PTX)
    elif layout.CONVERT_ONCE is not None:
        even = convert_rows(tile, layout.CONVERT_ONCE, layout.DTYPE, PTX)
        odd = even
    elif layout.KIND != "":
        even, odd = convert_pairs(tile, layout.KIND, PTX)
    else:
        even, odd = tile, tile
    return even, odd


@triton.jit
def _load_columns(array, layout, keys, head, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads COLUMNS columns starting at COLUMN, not converted."""
    # values that one loaded element holds
    PACK: tl.constexpr = 1 if layout.KIND == "" and layout.CONVERT_ONCE is None else 2
    if keys.run is not None:
        tile = array.load([keys.run[0], (head * layout.STEP + COLUMN) // PACK])
    else:
        tile = load_cache_rows(
            array, keys.cache_rows, keys.loaded, head, layout.HEADS, layout.STEP // PACK,
            layout.DIM // PACK, COLUMN // PACK, COLUMNS // PACK,
        )  # fmt: skip
    return tile


@triton.jit
def _load_run(array, layout, keys, first):
    """Loads columns starting at ``first`` by a ragged descriptor: rows past the run read as 0."""
    PACK: tl.constexpr = 1 if layout.KIND == "" and layout.CONVERT_ONCE is None else 2
    cache_row, count = keys.run
    tile = array.load([MAP_ROWS, cache_row + count, -count + MAP_ROWS, first // PACK])
    return tl.reshape(tile, [tile.shape[2], tile.shape[3]])


@triton.jit
def _load_values(
    array, layout, keys, head, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr
):
    """Loads (even, odd) columns of values, 0 where they may not be read."""
    if keys.run is not None:
        first = head * layout.STEP + layout.STEP // 2 + COLUMN
        tile = _load_run(array, layout, keys, first)
    else:
        tile = _load_columns(array, layout, keys, head, COLUMN, COLUMNS)
    return _convert_tile(tile, layout, PTX, False)


@triton.jit
def _add_scores(s, q, q_odd, even, odd, layout, PRECISION: tl.constexpr, OPAQUE: tl.constexpr):
    """Returns s ``[rows, BLOCK]`` plus the matmuls of queries with columns of keys."""
    s = _add_matmul(s, q, even, layout.DTYPE, PRECISION, OPAQUE)
    if layout.KIND != "":
        s = _add_matmul(s, q_odd, odd, layout.DTYPE, PRECISION, OPAQUE)
    return s


@triton.jit
def _add_matmul(s, q, k, DTYPE: tl.constexpr, PRECISION: tl.constexpr, OPAQUE: tl.constexpr):
    if OPAQUE:
        # the compiler would fold an addition into the next matmul, but not an fma
        zero = tl.zeros(s.shape, tl.float32)
        x = tl.dot(q, tl.trans(k.to(DTYPE)), zero, input_precision=PRECISION)
        s = tl.fma(x, zero + 1.0, s)
    else:
        s = tl.dot(q, tl.trans(k.to(DTYPE)), s, input_precision=PRECISION)
    return s


@triton.jit
def _add_values(acc, acc_odd, alpha, offset, p, even, odd, layout, PRECISION: tl.constexpr):
    """Returns acc * alpha + p v for even and for odd columns of values.

    ``offset``: a term of each row that is added to every column, or None.
    """
    acc = tl.dot(p, even.to(layout.DTYPE), _rescale(acc, alpha, offset), input_precision=PRECISION)
    if layout.KIND != "":
        acc_odd = _rescale(acc_odd, alpha, offset)
        acc_odd = tl.dot(p, odd.to(layout.DTYPE), acc_odd, input_precision=PRECISION)
    return acc, acc_odd


@triton.jit
def _rescale(acc, alpha, offset):
    if offset is None:
        return acc * alpha[:, None]
    else:
        zero = tl.zeros(acc.shape, tl.float32)
        return tl.fma(acc, alpha[:, None] + zero, offset[:, None] + zero)


@triton.jit
def _compute_form_scores(
    queries, tile, tail, layout, keys, head, FORM: tl.constexpr, PTX: tl.constexpr
):
    """Returns float32 scores of the keys with first columns ``tile`` in FORM."""
    sums = add_scores(None, queries.main, queries.main_odd, tile, FORM, layout.KIND, PTX)
    if layout.TAIL > 0:
        tile = _load_columns(tail, layout, keys, head, layout.MAIN, layout.TAIL)
        sums = add_scores(sums, queries.tail, queries.tail_odd, tile, FORM, layout.KIND, PTX)
    return combine_scores(sums, FORM)


@triton.jit
def _mask_hidden(s, keys):
    """Sets the logits of keys that a row does not see to -inf; None masks nothing."""
    if keys.loaded is not None:
        s = tl.where(keys.loaded[None, :], s, float("-inf"))
    if keys.tree is not None:
        s = _mask_tree(s, keys)
    elif keys.position is not None:
        s = tl.where(keys.j[None, :] <= keys.position[:, None], s, float("-inf"))
        if keys.left is not None:
            first = keys.position[:, None] - keys.left
            s = tl.where(keys.j[None, :] >= first, s, float("-inf"))
    return s


@triton.jit
def _load_marks(tree, number):
    """Returns 32 marks of each row, from the new token ``number`` on; there may be none."""
    word = (number + 32) // 32 - 1  # from -1 on
    shift = number - word * 32
    where = tree.words + tree.row * tree.count + word
    low = tl.load(where, mask=tree.inside & (word >= 0) & (word < tree.count), other=0)
    high = tl.load(where + 1, mask=tree.inside & (word + 1 < tree.count), other=0)
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return (both >> shift).to(tl.int32)


@triton.jit
def _mask_tree(s, keys):
    """Sets the logits of keys that a node of a tree does not see to -inf."""
    tree = keys.tree
    BLOCK: tl.constexpr = keys.j.shape[0]
    if keys.left is not None:
        is_before = (keys.j < tree.before)[None, :]
        least = tree.at[:, None] - keys.left
        s = tl.where(is_before & (keys.j[None, :] < least), float("-inf"), s)
    if tree.start + BLOCK > tree.before:
        first = tl.maximum(tree.start - tree.before, -BLOCK)  # new token
        number = keys.j - tree.start
        marks = tl.zeros(s.shape, tl.int32)
        for part in tl.static_range(0, (BLOCK + 31) // 32):
            # tokens before the new ones have no marks, and those far before have no words
            loaded = _load_marks(tree, tl.maximum(first + part * 32, -32))
            marks = tl.where((number // 32 == part)[None, :], loaded[:, None], marks)
        is_marked = ((marks >> (number % 32)[None, :]) & 1) != 0
        seen = (keys.j < tree.before)[None, :] | (keys.j[None, :] == keys.position[:, None])
        seen = (seen | is_marked) & (keys.position >= 0)[:, None]
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def attend_block(
    queries, m, l, e, sums, cache, v, head, keys, logits, dots, PTX: tl.constexpr, opaque=None  # noqa: E741
):  # fmt: skip
    """Returns the state (m, l, e, sums) after ``keys`` of a head.

    e: of ``fused_softmax``, if FUSED. v None: the first part of a key is also the value, read once;
    with a run ``cache.k`` is then the ragged descriptor and ``cache.k_tail`` that of other columns.

    ``opaque``: an opaque flag that is always true, or None. Triton distributes all warps along the
    rows of a matmul that feeds another matmul, and computes rows twice if there are too few. It
    does not look into branches, so behind this one the matmul is distributed along keys.
    """
    acc, acc_odd, acc_tail, acc_tail_odd = sums
    OPAQUE: tl.constexpr = opaque is not None
    tail = cache.k
    if cache.k_tail is None:
        tile = _load_columns(cache.k, cache.K, keys, head, 0, cache.K.MAIN)
    else:
        tail = cache.k_tail
        tile = _load_run(cache.k, cache.K, keys, 0)
    if dots.FORM != "":
        s = _compute_form_scores(queries, tile, tail, cache.K, keys, head, dots.FORM, PTX)
        even, odd = _convert_tile(tile, cache.K, PTX, dots.BIASED)
    else:
        even, odd = _convert_tile(tile, cache.K, PTX, False)
        s = tl.zeros([queries.main.shape[0], keys.j.shape[0]], tl.float32)
        s = _add_scores(
            s, queries.main, queries.main_odd, even, odd, cache.K, dots.PRECISION, OPAQUE
        )
        if cache.K.TAIL > 0:
            tile = _load_columns(tail, cache.K, keys, head, cache.K.MAIN, cache.K.TAIL)
            tail_even, tail_odd = _convert_tile(tile, cache.K, PTX, False)
            s = _add_scores(
                s, queries.tail, queries.tail_odd, tail_even, tail_odd, cache.K, dots.PRECISION,
                OPAQUE,
            )  # fmt: skip
    if queries.sign is not None:
        s = s * queries.sign[:, None]
    if logits.CAPPED:
        s = tanh_from_exp2(s * queries.inner[:, None])
    if keys.partly is None:
        s = _mask_hidden(s, keys)
    elif keys.partly:
        s = _mask_hidden(s, keys)
    offset = None
    if dots.BIASED:
        p, m, new, alpha = rounded_softmax(s, m, queries.slopes, cache.V.DTYPE)
        l = l * alpha + new  # noqa: E741
        offset = new * (-128.0 * 2.0**-24)
    elif dots.FUSED:
        p, m, l, e, alpha = fused_softmax(  # noqa: E741
            s, m, l, e, queries.slopes, queries.power, queries.large, True
        )
    elif opaque is None:
        p, m, l, alpha = online_softmax(s, m, l, queries.slopes, True, True)  # noqa: E741
    else:
        p = s
        alpha = m
        if opaque:
            p, m, l, alpha = online_softmax(s, m, l, queries.slopes, True, True)  # noqa: E741
    p = p.to(cache.V.DTYPE)
    if v is not None:
        even, odd = _load_values(v, cache.V, keys, head, 0, cache.V.MAIN, PTX)
    acc, acc_odd = _add_values(acc, acc_odd, alpha, offset, p, even, odd, cache.V, dots.PRECISION)
    if cache.V.TAIL > 0:
        tail_even, tail_odd = _load_values(v, cache.V, keys, head, cache.V.MAIN, cache.V.TAIL, PTX)
        acc_tail, acc_tail_odd = _add_values(
            acc_tail, acc_tail_odd, alpha, offset, p, tail_even, tail_odd, cache.V, dots.PRECISION
        )
    return m, l, e, (acc, acc_odd, acc_tail, acc_tail_odd)
