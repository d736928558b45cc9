"""Ragged attention that writes: new keys and values to their rows of the cache, in place.

Row m of sequence r goes to position ``length - count + m``; a value of another dtype than the
cache's is divided by its head's scale, cut to what the cache can hold and rounded to nearest even.

Work split: one program per (BLOCK packed rows, kv head); a row finds its sequence by counting the
sequences that end before it. Rows of no sequence, and those whose page is none, write nothing.

Bound: reading the new rows and writing them. 16,440 rows of 8 heads, D128 in bfloat16: 135 MB,
0.031 ms at 4.3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.serving.in_place import is_elsewhere
from ejkernel.kernels.triton.serving.launch import RaggedLaunch, sequential
from ejkernel.kernels.triton.serving.packed_rows import find_packed_rows, packed_sequences
from ejkernel.kernels.triton.serving.params import layout_params
from ejkernel.kernels.triton.serving.quantize import divide_to_8_bits, round_to_8_bits
from ejkernel.kernels.triton.serving.ragged_tiles import count_counters
from ejkernel.kernels.triton.serving.schedule import END_ROW, FIRST_ROW, KV_LEN, ROW_END
from ejkernel.kernels.triton.targets import ptx_level
from ejkernel.types.serving.problem import ITEMSIZE

COUNTED = tl.constexpr(256)  # counters that are set to 0 at once
BLOCK = 32  # packed rows of a program that writes
LANES = 64  # sequences it looks at at once: one compare for each row and each of them


@triton.jit
def _convert_to_cache(
    x, scale, head, dtype: tl.constexpr, EIGHT_BIT_DTYPE: tl.constexpr, VERBATIM: tl.constexpr,
    LARGEST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Returns keys or values ``x [BLOCK, D]`` of one head as the cache stores them, of ``dtype``.

    Rows of another dtype than the cache's are divided by the head's scale, if there is one, and
    saturate. Bits of 8-bit values are of ``dtype`` int8.
    """
    if not VERBATIM:
        x = x.to(tl.float32)
        if scale.array is None:
            if EIGHT_BIT_DTYPE != "":
                x = round_to_8_bits(x, EIGHT_BIT_DTYPE, PTX)
        else:
            factor = tl.load(scale.array + head * scale.head).to(tl.float32)
            if EIGHT_BIT_DTYPE != "":
                x = divide_to_8_bits(x, factor, EIGHT_BIT_DTYPE, PTX)
            else:
                x = tl.div_rn(x, tl.zeros_like(x) + factor)
        if EIGHT_BIT_DTYPE == "":
            x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), x)
    return x.to(dtype)


class WriteSizes(NamedTuple):
    """Sizes of a call."""

    n: int
    rows: int
    max_pages: int
    pages: int
    counters: int


class WriteTile(NamedTuple):
    """Constants.

    Attributes:
        KV_HEADS, D, COLUMNS: heads of the new keys, columns of a head, these as a power of two.
        K_HEADS, K_STEP: combined heads of a token in the cache, elements of each.
        PAGE: tokens of a page.
        BLOCK, LANES: rows of a program, sequences that it looks at at once.
        EIGHT_BIT_DTYPE: the dtype of an 8-bit cache, else "".
        LARGEST: the largest value of another cache's dtype.
        VERBATIM_K, VERBATIM_V: new keys, new values are of the cache's dtype.
    """

    KV_HEADS: int
    D: int
    COLUMNS: int
    K_HEADS: int
    K_STEP: int
    PAGE: int
    BLOCK: int
    LANES: int
    EIGHT_BIT_DTYPE: str
    LARGEST: float
    VERBATIM_K: bool
    VERBATIM_V: bool


@triton.jit
def _write_rows(
    block, head, keys, values, tables, packed, first_rows, sequences, header, k_scale, v_scale,
    cache, sizes, tile, PTX: tl.constexpr,
):  # fmt: skip
    """Writes the keys and values of one head in one block of packed rows."""
    n = sizes.n
    row = block * tile.BLOCK + tl.arange(0, tile.BLOCK)
    is_valid = row < sizes.rows
    if header is not None:
        is_valid = (row >= tl.load(header + FIRST_ROW)) & (row < tl.load(header + END_ROW))
    column = tl.arange(0, tile.COLUMNS)
    # loaded before the rows of the cache are known, while one look-up waits for the other
    source = (row.to(tl.int64) * tile.KV_HEADS + head)[:, None] * tile.D + column[None, :]
    mask = is_valid[:, None] & (column < tile.D)[None, :]
    new_keys = tl.load(keys + source, mask=mask, other=0)
    new_values = tl.load(values + source, mask=mask, other=0)

    if packed is not None:
        capacity = sizes.max_pages * tile.PAGE
        r, first, last, length = find_packed_rows(row, packed, n, sizes.rows, capacity, tile.LANES)
        is_valid = is_valid & (last > 0)
    else:
        r = tl.zeros([tile.BLOCK], tl.int32)
        for base in range(0, n, tile.LANES):
            i = base + tl.arange(0, tile.LANES)
            end = tl.load(sequences + ROW_END * n + i, mask=i < n, other=2147483647)
            r += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
        r = tl.minimum(r, n - 1)
        last = tl.load(sequences + ROW_END * n + r)
        length = tl.load(sequences + KV_LEN * n + r)
        first = tl.load(first_rows + r)
    position = length - last + row
    is_valid = is_valid & (position >= 0) & (row >= first)
    page = tl.load(
        tables + r.to(tl.int64) * sizes.max_pages + position // tile.PAGE, mask=is_valid, other=-1
    )
    is_valid = is_valid & (page >= 0) & (page < sizes.pages)
    cache_row = page.to(tl.int64) * tile.PAGE + position % tile.PAGE

    mask = is_valid[:, None] & (column < tile.D)[None, :]
    target = cache + ((cache_row * tile.K_HEADS + head) * tile.K_STEP)[:, None] + column[None, :]
    dtype: tl.constexpr = cache.dtype.element_ty
    x = _convert_to_cache(
        new_keys, k_scale, head, dtype, tile.EIGHT_BIT_DTYPE, tile.VERBATIM_K, tile.LARGEST, PTX
    )
    tl.store(target, x, mask=mask)
    x = _convert_to_cache(
        new_values, v_scale, head, dtype, tile.EIGHT_BIT_DTYPE, tile.VERBATIM_V, tile.LARGEST, PTX
    )
    tl.store(target + tile.K_STEP // 2, x, mask=mask)


@triton.jit
def _copy_head(source, cache, cache_rows, head, K_HEADS: tl.constexpr, K_STEP: tl.constexpr):
    """Copies one combined head of every row of the cache."""
    WIDTH: tl.constexpr = triton.next_power_of_2(K_STEP)
    ROWS: tl.constexpr = 8192 // WIDTH
    column = tl.arange(0, WIDTH)[None, :]
    for begin in range(0, cache_rows, ROWS):
        cache_row = (begin + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        at = (cache_row * K_HEADS + head) * K_STEP + column
        mask = (cache_row < cache_rows) & (column < K_STEP)
        tl.store(cache + at, tl.load(source + at, mask=mask), mask=mask)


@triton.jit
def ragged_write(
    keys, values, tables, packed, first_rows, sequences, header, k_scale, v_scale, cache_in, cache,
    counters, sizes, tile, PTX: tl.constexpr,
):  # fmt: skip
    """Writes keys and values into the cache, which is in the memory of ``cache_in``.

    Without a schedule, whose tables are then None, ``packed`` says which rows a sequence has, and
    the ``counters`` of ``few_rows`` are set to 0.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    if counters is not None:
        if head + block == 0:
            for start in range(0, sizes.counters, COUNTED):
                i = start + tl.arange(0, COUNTED)
                tl.store(counters + i, tl.zeros([COUNTED], tl.int32), mask=i < sizes.counters)
    stop = block + 1
    if is_elsewhere(cache_in, cache):
        # A program per head copies and writes all of the head, which no other program touches.
        # Slow, and rare: XLA is kept from it where it is known to do it (``stages``).
        stop = tl.where(block == 0, tl.cdiv(sizes.rows, tile.BLOCK), 0)
        if block == 0:
            for other in range(head, tile.K_HEADS, tile.KV_HEADS):
                _copy_head(
                    cache_in, cache, sizes.pages * tile.PAGE, other, tile.K_HEADS, tile.K_STEP
                )
            tl.debug_barrier()
    for b in range(block, stop):
        _write_rows(
            b, head, keys, values, tables, packed, first_rows, sequences, header, k_scale, v_scale,
            cache, sizes, tile, PTX,
        )  # fmt: skip


@dataclass(frozen=True)
class RaggedWrite(RaggedLaunch):
    """Launch of ``ragged_write``; the result is the cache, in its own memory."""

    kernel = ragged_write
    batching: ClassVar = sequential(
        "keys values tables starts lens valid packed_rows first_rows sequences header k_scale"
        " v_scale cache_in"
    )

    @property
    def counters(self) -> int:
        """Counters that are set to 0."""
        return 0 if self.has("header") else count_counters(self.problem, self.tiles)

    def outputs(self):
        return {
            "cache": struct(self.problem.paged.key_dtype, *(self.shape("cache_in") or ())),
            "counters": struct("int32", self.counters) if self.counters else None,
        }

    def in_place(self):
        return {"cache": "cache_in"}

    def grid(self, target):
        return (-(-self.problem.rows // BLOCK), self.problem.paged.kv_heads)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        p, (key, value) = self.problem.paged, self.problem.written_dtypes
        eight_bit = ITEMSIZE[p.key_dtype] == 1
        view, layout = "int8" if eight_bit else None, layout_params(p)
        packed = None
        if not self.has("header"):
            packed = packed_sequences(self)
        return {
            "packed": packed,
            "keys": self.operand("keys", view if key == p.key_dtype else None),
            "values": self.operand("values", view if value == p.key_dtype else None),
            "k_scale": self.scale("k_scale"),
            "v_scale": self.scale("v_scale"),
            "cache_in": self.operand("cache_in", view),
            "cache": self.result("cache", view),
            "sizes": WriteSizes(p.batch, self.problem.rows, p.max_pages, p.pages, self.counters),
            "tile": WriteTile(
                KV_HEADS=p.kv_heads,
                D=p.dim,
                COLUMNS=max(16, power_of_two(p.dim)),
                K_HEADS=layout["K_HEADS"],
                K_STEP=layout["K_STEP"],
                PAGE=p.page_size,
                BLOCK=BLOCK if packed is None else min(BLOCK, power_of_two(self.problem.rows)),
                LANES=LANES if packed is None else power_of_two(p.batch),
                EIGHT_BIT_DTYPE=p.key_dtype if eight_bit else "",
                LARGEST=0.0 if eight_bit else float(jnp.finfo(p.key_dtype).max),
                VERBATIM_K=key == p.key_dtype,
                VERBATIM_V=value == p.key_dtype,
            ),
            "PTX": ptx_level(target),
        }
