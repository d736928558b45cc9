"""Where tokens lie in a paged cache, and reading them as numbers.

Token j of a sequence lies in page ``table[j // PAGE]`` at place ``j % PAGE``. A block of tokens
inside one page is contiguous and costs one look-up; a block over several pages is gathered by
pointer arithmetic, one look-up a token (neighbours hit the same cache line).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_pages(table, first, stop, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Page of the tokens first .. first + BLOCK: one number, or ``[BLOCK]`` when they are several.

    ``first`` is a multiple of BLOCK. Table entries from ``stop`` on are not read. Entries come
    as they are: nothing here waits for the memory.
    """
    if PAGE % BLOCK == 0:
        page = tl.load(table + first // PAGE, mask=first < stop, other=0)
    else:
        j = first + tl.arange(0, BLOCK)
        page = tl.load(table + j // PAGE, mask=j < stop, other=0)
    return page


@triton.jit
def token_places(page, first, pages, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """int64 ``[BLOCK]``: page * PAGE + place, ``page`` being what ``block_pages`` gave.

    Page numbers are clipped into the cache of ``pages`` pages.
    """
    offsets = tl.arange(0, BLOCK)
    page = tl.minimum(tl.maximum(page, 0), pages - 1)
    if PAGE % BLOCK == 0:
        places = page.to(tl.int64) * PAGE + first % PAGE + offsets
    else:
        places = page.to(tl.int64) * PAGE + (first + offsets) % PAGE
    return places


@triton.jit
def load_places(
    cache,
    places,
    seen,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBER: tl.constexpr,
    E4M3_BITS: tl.constexpr,
):
    """Columns COLUMN .. COLUMN + COLUMNS of one head at ``places``, as dtype NUMBER.

    cache ``[pages, PAGE, HEADS, DIM]``. Tokens not ``seen`` are not read: they are 0, whatever
    memory holds. int8 becomes float16 exactly; with E4M3_BITS, bytes are float8_e4m3fn.
    """
    column = COLUMN + tl.arange(0, COLUMNS)
    pointers = cache + ((places * HEADS + head) * DIM)[:, None] + column[None, :]
    mask = seen[:, None]
    if COLUMN + COLUMNS > DIM:
        mask = mask & (column < DIM)[None, :]
    tile = tl.load(pointers, mask=mask, other=0.0)
    if E4M3_BITS:
        tile = e4m3_bits(tile)
    elif tile.dtype == tl.int8 and NUMBER == tl.float16:
        tile = int8_half(tile)
    return tile.to(NUMBER)


@triton.jit
def int8_half(x):
    """int8 to float16 without the conversion unit: 0x6480 + x are the bits of 1152 + x."""
    bits = x.to(tl.int16) + 0x6480
    return bits.to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def e4m3_bits(x):
    """uint8 holding float8_e4m3fn to float16, exactly, for chips that do not know the type.

    Exponent and mantissa moved to float16's places are the number times 2**-8, subnormals too.
    """
    bits = x.to(tl.int16)
    low = bits & 0x7F
    half = (((bits & 0x80) << 8) | (low << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where(low == 0x7F, float("nan"), half).to(tl.float16)
