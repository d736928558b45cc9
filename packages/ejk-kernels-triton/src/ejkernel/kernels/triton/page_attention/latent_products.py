"""Latent decoding on Hopper: queries as operands, scores with 8-bit keys, accumulators to memory.

Keys are the rows of matmuls: int8 ones meet both digits of the queries side by side, as they lie
in shared memory (``common.eight_bit_keys``); float8 ones pass through registers.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.eight_bit_keys import convert_adjacent, digits, quads
from ejkernel.kernels.triton.common.queries import digit_factors, largest_bits, row_factors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(16)  # heads, as many as the narrowest second operand has


@gluon.jit
def _read_part(
    q, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, there, cache, HEADS: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    column = COLUMN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    place = row[:, None] * cache.K.DIM + column[None, :]
    return gl.load(q + place, mask=((row < HEADS) & there)[:, None], other=0.0)


@gluon.jit
def read_queries(q, b, there, cache, HEADS: gl.constexpr):
    """Both parts of the queries of sequence b; 0 where not ``there``."""
    MAIN: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    REST: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    q += b.to(gl.int64) * (HEADS * cache.K.DIM)
    x = _read_part(q, 0, cache.K.MAIN, there, cache, HEADS, MAIN)
    return x, _read_part(q, cache.K.MAIN, cache.K.REST, there, cache, HEADS, REST)


@gluon.jit
def store_queries(x, y, factor, logits, cache, q_main, q_rest):
    """Operands of scores to their places: (slopes, inner) of the rows, see ``common.queries``.

    A warp has the same rows of both parts: what is known of rows goes from one to the other as it
    is.
    """
    MAIN: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    REST: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    x = x.to(gl.float32)
    y = y.to(gl.float32)
    if cache.K.KIND == "int8":
        bits = gl.convert_layout(largest_bits(y), MAIN, assert_trivial=True)
        bits = gl.maximum(largest_bits(x), bits)
        scale, slopes, inner = digit_factors(bits, factor, logits)
        parts = digits(x, scale) + digits(y, gl.convert_layout(scale, REST, assert_trivial=True))
    else:
        size = gl.convert_layout(gl.max(gl.abs(y), 1), MAIN, assert_trivial=True)
        size = gl.maximum(gl.max(gl.abs(x), 1), size)
        one = gl.full([ROWS], 1.0, gl.float32, MAIN)
        weight, slopes, inner = row_factors(one, size, factor, logits, False)
        x = (x * weight[:, None]).to(gl.float16)
        weight = gl.convert_layout(weight, REST, assert_trivial=True)
        parts = quads(x) + quads((y * weight[:, None]).to(gl.float16))
    for n in gl.static_range(2):
        q_main.slice(n * ROWS, ROWS, dim=0).store(parts[n])
        q_rest.slice(n * ROWS, ROWS, dim=0).store(parts[2 + n])
    fence_async_shared()
    return slopes, inner


@gluon.jit
def scores_as_they_lie(main, rest, q_main, q_rest, BOTH: gl.constexpr):
    """Returns matmuls of int8 keys with both digits side by side, still running."""
    BLOCK: gl.constexpr = rest.shape[0]
    DIM: gl.constexpr = q_main.shape[1]
    REST: gl.constexpr = q_rest.shape[1]
    numbers = main.reinterpret(gl.int8, [BLOCK, DIM], q_main.layout)
    more = rest.reinterpret(gl.int8, [BLOCK, REST], q_rest.layout)
    d = gl.zeros([BLOCK, 2 * ROWS], gl.int32, BOTH)
    d = warpgroup_mma(numbers, q_main.permute((1, 0)), d, use_acc=False, is_async=True)
    return warpgroup_mma(more, q_rest.permute((1, 0)), d, is_async=True)


@gluon.jit
def sum_of_digits(d, S: gl.constexpr):
    """float32 scores of them."""
    high, low = gl.split(gl.permute(gl.reshape(d, [d.shape[0], 2, ROWS]), (0, 2, 1)))
    s = high.to(gl.float32) * 256.0 + low.to(gl.float32)
    return gl.convert_layout(s, S, assert_trivial=True)


@gluon.jit
def add_scores(s, pairs, q, KIND: gl.constexpr, PTX: gl.constexpr, A: gl.constexpr):
    """Returns s plus matmuls of float8 columns; some are converted while others are added."""
    COLUMNS: gl.constexpr = pairs.shape[1] if pairs.shape[1] < 64 else 64
    STEPS: gl.constexpr = pairs.shape[1] // COLUMNS
    x = pairs.slice(0, COLUMNS, dim=1).load(A)
    for n in gl.static_range(STEPS):
        parts = gl.split(gl.reshape(x, [x.shape[0], COLUMNS // 2, 2]))
        if n + 1 < STEPS:
            x = pairs.slice((n + 1) * COLUMNS, COLUMNS, dim=1).load(A)
        for i in gl.static_range(2):
            k = gl.convert_layout(convert_adjacent(parts[i], KIND, PTX), A, assert_trivial=True)
            part = q.slice(i * ROWS, ROWS, dim=0).slice(n * COLUMNS, COLUMNS, dim=1)
            s = warpgroup_mma(k, part.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(2, deps=[s])
    return s


@gluon.jit
def store_pairs(out, even, odd, HEADS: gl.constexpr, MAIN: gl.constexpr):
    """Even and odd columns ``[columns, heads]`` to rows of MAIN columns."""
    both = gl.join(even, odd).to(out.dtype.element_ty)
    L: gl.constexpr = both.type.layout
    c = gl.arange(0, both.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    i = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    place = (c * 2)[:, None, None] + (head * MAIN)[None, :, None] + i[None, None, :]
    gl.store(out + place, both, mask=(head < HEADS)[None, :, None])
