"""Queries prepared for a cache: in the dtype of its matmuls, with the slopes of their logits.

Logits are q k^T times a positive slope for each row; the sign of a scale goes into the queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.serving.eight_bit_scores import (
    MAX_QUERY,
    split_column_pairs,
    split_digits,
)


class Queries(NamedTuple):
    """Rows of queries.

    Attributes:
        main, main_odd: main columns, for even and for odd columns of keys.
        tail, tail_odd: tail columns, likewise.
        slopes, inner: slopes of their logits, and inside the soft cap.
        sign: sign of the scale, None if the queries include it.
        power, large: as for ``fused_softmax``.
    """

    main: Any
    main_odd: Any
    tail: Any
    tail_odd: Any
    slopes: Any
    inner: Any
    sign: Any
    power: Any
    large: Any


@triton.jit
def _load_queries(q, rows, inside, D: tl.constexpr, COLUMN: tl.constexpr, COLS: tl.constexpr):
    """Loads columns COLUMN .. COLUMN + COLS of int64 ``rows`` of ``[., D]``; 0 where not inside."""
    column = COLUMN + tl.arange(0, COLS)
    mask = inside[:, None] & (column < D)[None, :]
    return tl.load(q + rows[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def _sign(x):
    """Returns 1 or -1, and 0 for 0 and NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def _apply_cap(slopes, logits):
    """Returns (slopes, inner): outer slopes and slopes inside the soft cap; NaN stays NaN."""
    inner = slopes * logits.cap_in
    if logits.CAPPED:
        slopes = slopes * 0.0 + logits.cap_out
    return slopes, inner


@triton.jit
def compute_row_factors(ones, size, factor, logits, POSITIVE: tl.constexpr):
    """Returns (weight, slopes, inner) for logits scaled by ``factor`` and queries by ``weight``.

    ``ones``: a 1.0 for each row. ``size``: the largest magnitude of each row, which weight brings
    near 1; None: weight is only a sign. inner: slopes inside the soft cap. POSITIVE: the factor is
    greater than 0.
    """
    slopes = ones * tl.abs(factor)
    weight = ones
    if not POSITIVE:
        weight = ones * _sign(factor)
    if size is not None:
        power, inverse = power_of_two(size)
        weight = weight * inverse
        slopes = slopes * power
    slopes, inner = _apply_cap(tl.maximum(slopes, 2.0**-120), logits)
    return weight, slopes, inner


@triton.jit
def _scale_queries(
    q, q_tail, factor, logits, layout, NORMALISE: tl.constexpr, POSITIVE: tl.constexpr
):
    """Returns (q, q_more, slopes, inner): queries in the dtype of the matmul.

    NORMALISE: scale the largest entry of a row near 1, so that any query fits float16; slopes undo
    it. Without it and with a positive factor queries stay as they are loaded, and MMAs read them in
    place. The other arguments and results are as for ``compute_row_factors``.
    """
    ones = tl.full([q.shape[0]], 1.0, tl.float32)
    size = None
    if NORMALISE:
        q = q.to(tl.float32)
        size = tl.max(tl.abs(q), 1)
        if layout.TAIL > 0:
            q_tail = q_tail.to(tl.float32)
            size = tl.maximum(size, tl.max(tl.abs(q_tail), 1))
    weight, slopes, inner = compute_row_factors(ones, size, factor, logits, POSITIVE)
    if NORMALISE or not POSITIVE:
        q = q.to(tl.float32) * weight[:, None]
        if layout.TAIL > 0:
            q_tail = q_tail.to(tl.float32) * weight[:, None]
    if layout.TAIL > 0:
        q_tail = q_tail.to(layout.DTYPE)
    return q.to(layout.DTYPE), q_tail, slopes, inner


@triton.jit
def _split_columns(q, KIND: tl.constexpr, FORM: tl.constexpr):
    """Splits columns as an 8-bit cache does, in even and odd ones; otherwise returns all twice."""
    if KIND == "":
        even, odd = q, q
    elif FORM == "column_pairs":
        even, odd = split_column_pairs(q)
    else:
        even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
    return even, odd


@triton.jit
def prepare_queries(q, rows, inside, factor, logits, layout, dots, POSITIVE: tl.constexpr):
    """Loads int64 ``rows`` of q, 0 where not inside, as ``Queries`` for keys of ``layout``."""
    main = _load_queries(q, rows, inside, layout.DIM, 0, layout.MAIN)
    tail = main
    if layout.TAIL > 0:
        tail = _load_queries(q, rows, inside, layout.DIM, layout.MAIN, layout.TAIL)
    if dots.FORM == "int8_split":
        main, main_odd, tail, tail_odd, slopes, inner = _split_both_parts(
            main, tail, factor, logits, layout
        )
    else:
        main, tail, slopes, inner = _scale_queries(
            main, tail, factor, logits, layout, dots.NORMALISE, POSITIVE
        )
        main, main_odd = _split_columns(main, layout.KIND, dots.FORM)
        tail_odd = main_odd
        if layout.TAIL > 0:
            tail, tail_odd = _split_columns(tail, layout.KIND, dots.FORM)
    power, _ = power_of_two(slopes)
    large = 1073741824.0 / slopes
    return Queries(main, main_odd, tail, tail_odd, slopes, inner, None, power, large)


@triton.jit
def max_magnitude_bits(q):
    """Returns int32 bits of the largest magnitude of each row of float32 ``q``; NaN is largest."""
    return tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def compute_digit_factors(bits, factor, logits):
    """Returns (scale, slopes, inner) for queries as digits.

    ``bits``: see ``max_magnitude_bits``.
    """
    size = bits.to(tl.float32, bitcast=True)
    # digits are finite: a NaN or infinite query makes all logits of its row NaN
    wrong = tl.where(bits < 0x7F800000, 0.0, float("nan"))
    power, inverse = power_of_two(size)
    near_one = tl.maximum(size * inverse, 2.0**-100)
    scale = inverse * (MAX_QUERY / near_one)
    slopes = tl.maximum(tl.abs(factor) * (power * near_one * (1.0 / MAX_QUERY)), 2.0**-120) + wrong
    slopes, inner = _apply_cap(slopes, logits)
    return scale * _sign(factor), slopes, inner


@triton.jit
def _split_both_parts(q, q_tail, factor, logits, layout):
    """Returns both digits of main and tail columns, and (slopes, inner) as ``_scale_queries``."""
    q = q.to(tl.float32)
    bits = max_magnitude_bits(q)
    if layout.TAIL > 0:
        q_tail = q_tail.to(tl.float32)
        bits = tl.maximum(bits, max_magnitude_bits(q_tail))
    scale, slopes, inner = compute_digit_factors(bits, factor, logits)
    high, low = split_digits(q, scale)
    high_tail, low_tail = high, low
    if layout.TAIL > 0:
        high_tail, low_tail = split_digits(q_tail, scale)
    return high, low, high_tail, low_tail, slopes, inner


@triton.jit
def load_raw_queries(q, rows, inside, factor, logits, layout, POSITIVE: tl.constexpr):
    """Loads ``rows`` of q unchanged; the sign of the factor is applied to the scores.

    Asynchronous MMAs read such queries from shared memory; any arithmetic would move them to
    registers.
    """
    main = _load_queries(q, rows, inside, layout.DIM, 0, layout.MAIN)
    tail = main
    if layout.TAIL > 0:
        tail = _load_queries(q, rows, inside, layout.DIM, layout.MAIN, layout.TAIL)
    ones = tl.full([main.shape[0]], 1.0, tl.float32)
    sign = None
    if not POSITIVE:
        sign = ones * _sign(factor)
    slopes, inner = _apply_cap(tl.maximum(ones * tl.abs(factor), 2.0**-120), logits)
    return Queries(main, main, tail, tail, slopes, inner, sign, None, None)


@triton.jit
def power_of_two(x):
    """Returns (p, 1 / p) with p the power of two at or below x > 0; (1, 1) if x is tiny or huge."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits < 0x08000000) | (bits > 0x77000000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)
