"""Ragged attention that writes: new keys and values to their places in the cache, in place.

Row m of sequence r goes to position ``length - count + m``; a number of another dtype than the
cache's is divided by its head's scale, cut to what the cache can hold and rounded to nearest even.

Work split: one program per (BLOCK packed rows, kv head); a row finds its sequence by counting the
sequences that end before it. Rows of no sequence, and those whose page is none, write nothing.

Bound: reading the new rows and writing them. 16,440 rows of 8 heads, D128 in bfloat16: 135 MB,
0.031 ms at 4.3 TB/s.
"""

from __future__ import annotations

from ejkernel.kernels.triton.common.in_place import is_elsewhere
from ejkernel.kernels.triton.common.narrow import eight_bit_quotients, eight_bits
from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def _stored(
    x, scale, head, kind: tl.constexpr, KIND: tl.constexpr, VERBATIM: tl.constexpr,
    LARGEST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    if not VERBATIM:
        x = x.to(tl.float32)
        if scale.array is None:
            if KIND != "":
                x = eight_bits(x, KIND, PTX)
        else:
            factor = tl.load(scale.array + head * scale.head).to(tl.float32)
            if KIND != "":
                x = eight_bit_quotients(x, factor, KIND, PTX)
            else:
                x = tl.div_rn(x, tl.zeros_like(x) + factor)
        if KIND == "":
            x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), x)
    return x.to(kind)


@triton.jit
def _write_rows(
    block, head, keys, values, tables, first_rows, work, facts, k_scale, v_scale, cache, n,
    max_pages, pages,
    KV_HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, K_HEADS: tl.constexpr,
    K_STEP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    KIND: tl.constexpr, LARGEST: tl.constexpr, VERBATIM_K: tl.constexpr,
    VERBATIM_V: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Writes the keys and values of one head in one block of packed rows."""
    row = block * BLOCK + tl.arange(0, BLOCK)
    here = (row >= tl.load(facts + 1)) & (row < tl.load(facts + 2))
    column = tl.arange(0, COLUMNS)
    # read before their places are known: whoever waits for one look-up after the other has them
    source = (row.to(tl.int64) * KV_HEADS + head)[:, None] * D + column[None, :]
    mask = here[:, None] & (column < D)[None, :]
    new_keys = tl.load(keys + source, mask=mask, other=0)
    new_values = tl.load(values + source, mask=mask, other=0)

    r = tl.zeros([BLOCK], tl.int32)
    for base in range(0, n, LANES):
        i = base + tl.arange(0, LANES)
        end = tl.load(work + i, mask=i < n, other=2147483647)
        r += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    r = tl.minimum(r, n - 1)
    last = tl.load(work + r)
    length = tl.load(work + n + r)
    first = tl.load(first_rows + r)
    position = length - last + row
    here = here & (position >= 0) & (row >= first)
    page = tl.load(tables + r.to(tl.int64) * max_pages + position // PAGE, mask=here, other=-1)
    here = here & (page >= 0) & (page < pages)
    place = page.to(tl.int64) * PAGE + position % PAGE

    mask = here[:, None] & (column < D)[None, :]
    target = cache + ((place * K_HEADS + head) * K_STEP)[:, None] + column[None, :]
    kind: tl.constexpr = cache.dtype.element_ty
    x = _stored(new_keys, k_scale, head, kind, KIND, VERBATIM_K, LARGEST, PTX)
    tl.store(target, x, mask=mask)
    x = _stored(new_values, v_scale, head, kind, KIND, VERBATIM_V, LARGEST, PTX)
    tl.store(target + K_STEP // 2, x, mask=mask)


@triton.jit
def _copy_head(source, cache, places, head, K_HEADS: tl.constexpr, K_STEP: tl.constexpr):
    """Copies one combined head of every place of the cache."""
    WIDTH: tl.constexpr = triton.next_power_of_2(K_STEP)
    ROWS: tl.constexpr = 8192 // WIDTH
    column = tl.arange(0, WIDTH)[None, :]
    for begin in range(0, places, ROWS):
        place = (begin + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        at = (place * K_HEADS + head) * K_STEP + column
        mask = (place < places) & (column < K_STEP)
        tl.store(cache + at, tl.load(source + at, mask=mask), mask=mask)


@triton.jit
def ragged_write(
    keys,
    values,
    tables,
    first_rows,
    work,
    facts,
    k_scale,
    v_scale,
    given,
    cache,
    n,
    rows,
    max_pages,
    pages,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    VERBATIM_K: tl.constexpr,
    VERBATIM_V: tl.constexpr,
    PTX: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    stop = block + 1
    if is_elsewhere(given, cache):
        # A program per head copies and writes it all: no other program touches what is its own.
        # Slow, and rare: XLA is kept from it where it is known to do it (``implementation``).
        stop = tl.where(block == 0, tl.cdiv(rows, BLOCK), 0)
        if block == 0:
            for other in range(head, K_HEADS, KV_HEADS):
                _copy_head(given, cache, pages * PAGE, other, K_HEADS, K_STEP)
            tl.debug_barrier()
    for b in range(block, stop):
        _write_rows(
            b, head, keys, values, tables, first_rows, work, facts, k_scale, v_scale, cache, n,
            max_pages, pages, KV_HEADS, D, COLUMNS, K_HEADS, K_STEP, PAGE, BLOCK, LANES, KIND,
            LARGEST, VERBATIM_K, VERBATIM_V, PTX,
        )  # fmt: skip
