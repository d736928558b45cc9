"""Places of tokens in a paged cache, and their loads.

Token j of a sequence lies in page ``table[j // PAGE]`` at place ``j % PAGE``. A block of tokens
inside one page is contiguous and costs one look-up; a block over several pages is gathered by
pointer arithmetic, one look-up a token (adjacent tokens hit the same cache line).
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


@triton.jit
def load_block_pages(table, first, stop, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Loads the page of the tokens first .. first + BLOCK: a scalar, or ``[BLOCK]`` for several.

    ``first`` is a multiple of BLOCK. Table entries of tokens at or after ``stop`` are not read.
    Entries are not clipped, so that nothing here waits for the load.
    """
    if PAGE % BLOCK == 0:
        page = tl.load(table + first // PAGE, mask=first < stop, other=0)
    else:
        j = first + tl.arange(0, BLOCK)
        page = tl.load(table + j // PAGE, mask=j < stop, other=0)
    return page


@triton.jit
def compute_cache_rows(page, first, pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns int64 ``[BLOCK]``: page * PAGE + place, with ``page`` from ``load_block_pages``.

    Pages are clipped to the cache of ``pages`` pages.
    """
    offsets = tl.arange(0, BLOCK)
    page = tl.minimum(tl.maximum(page, 0), pages - 1)
    if PAGE % BLOCK == 0:
        cache_rows = page.to(tl.int64) * PAGE + first % PAGE + offsets
    else:
        cache_rows = page.to(tl.int64) * PAGE + (first + offsets) % PAGE
    return cache_rows


@triton.constexpr_function
def spans_full_pages(page, block):
    """Returns whether a block consists of several full pages."""
    return page < block and page & (page - 1) == 0


@triton.jit
def _lookup_tokens(first, low, last, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the tokens whose pages are looked up: one, the first of every page, or all."""
    if PAGE % BLOCK == 0:
        j = first
    elif spans_full_pages(PAGE, BLOCK):
        j = tl.minimum(first + tl.arange(0, BLOCK // PAGE) * PAGE, last // PAGE * PAGE)
        if low is not None:
            j = tl.maximum(j, low // PAGE * PAGE)
    else:
        j = tl.minimum(first + tl.arange(0, BLOCK), last)
        if low is not None:
            j = tl.maximum(j, low)
    return j


@triton.jit
def load_clamped_pages(table, first, low, last, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Loads pages of the tokens first .. first + BLOCK for ``compute_clamped_rows``.

    Entries of tokens before ``low`` (None: there are none) and after ``last`` are not read.
    """
    j = _lookup_tokens(first, low, last, PAGE, BLOCK)
    if PAGE % BLOCK == 0:
        j = tl.minimum(j, last)
    return tl.load(table + j // PAGE)


@triton.jit
def compute_clamped_rows(page, first, low, last, pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the places of the tokens first .. first + BLOCK, int32 ``[BLOCK]``.

    Tokens before ``low`` get the place of ``low``, tokens after ``last`` the place of ``last``:
    memory of unused tokens is not read, and loads need no mask. Pages are clipped to the cache of
    ``pages`` pages.
    """
    page = tl.minimum(tl.maximum(page, 0), pages - 1) * PAGE
    j = _lookup_tokens(first, low, last, PAGE, BLOCK)
    if PAGE % BLOCK == 0:
        inner = tl.minimum(tl.arange(0, BLOCK), last - first)
        if low is not None:
            inner = tl.maximum(inner, low - first)
        cache_rows = page + first % PAGE + inner
    elif spans_full_pages(PAGE, BLOCK):
        inner = tl.minimum(tl.arange(0, PAGE)[None, :], (last - j)[:, None])
        if low is not None:
            inner = tl.maximum(inner, (low - j)[:, None])
        cache_rows = tl.reshape(page[:, None] + inner, [BLOCK])
    else:
        cache_rows = page + j % PAGE
    return cache_rows


@triton.jit
def clamp_run(page, first, last, pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns (place of token ``first``, number of the BLOCK tokens up to ``last``).

    A block lies inside one page.
    """
    page = tl.minimum(tl.maximum(page, 0), pages - 1)
    return page * PAGE + first % PAGE, tl.minimum(BLOCK, last - first + 1)


@triton.jit
def load_cache_rows(
    cache,
    cache_rows,
    seen,
    head,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Loads columns COLUMN .. COLUMN + COLUMNS of one head at ``cache_rows``.

    cache ``[pages, PAGE, HEADS, STEP]``; a head uses the first DIM of STEP columns. Tokens not
    ``seen`` are not read but 0; None: all are read.
    """
    column = COLUMN + tl.arange(0, COLUMNS)
    # the loop-invariant part first: a place is then one multiply-add
    first = cache + head * STEP + column
    pointers = first[None, :] + (cache_rows.to(tl.int64) * (HEADS * STEP))[:, None]
    if seen is not None:
        mask = seen[:, None]
        if COLUMN + COLUMNS > DIM:
            mask = mask & (column < DIM)[None, :]
        tile = tl.load(pointers, mask=mask, other=0)
    elif COLUMN + COLUMNS > DIM:
        tile = tl.load(pointers, mask=(column < DIM)[None, :], other=0)
    else:
        tile = tl.load(pointers)
    return tile
