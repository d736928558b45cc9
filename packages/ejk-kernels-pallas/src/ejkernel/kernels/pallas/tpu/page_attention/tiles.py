"""Tiles of decoding over a cache on TPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.pallas.tpu.common import trees
from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.ops.params import config_field
from ejkernel.types.serving.problem import ITEMSIZE, PagedProblem

QUERY_DTYPES = ("bfloat16", "float32")
CACHE_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
# A block of 2 MiB takes 2.5 microseconds on v5e and 1.2 on v6e: long against the latency of a copy.
BLOCK_BYTES = 2**21
MAX_COLUMNS = 4096  # of a score tile: (token, kv head) pairs
MAX_SCORES = 2**18  # of a score tile: more spill more registers than the next block takes to arrive


@dataclass(frozen=True)
class Tiles:
    """Blocks of the cache.

    Attributes:
        pages: pages in a block; of a contiguous cache, whose pages are runs of ``tokens``, one.
        tokens: tokens of a page.
    """

    pages: int
    tokens: int

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.pages * self.tokens

    @property
    def fields(self) -> dict[str, int]:
        """Returns the config field of a paged cache."""
        return {"pages_per_block": self.pages}

    def apply_config(self, cfg: Any, problem: PagedProblem, target: Chip) -> Tiles:
        """Returns these tiles with the pages that a config gives."""
        pages = config_field(cfg, "pages_per_block")
        if pages is None:
            return self
        return Tiles(max(1, min(int(pages), problem.max_pages)), self.tokens)

    def vmem(self, p: PagedProblem) -> int:
        """Bytes of vector memory: two buffers of keys and values, the scores and probabilities of a
        block, and 8-bit values widened."""
        columns = self.block * p.kv_heads
        rows = -(-p.tokens * p.heads // 16) * 16
        caches = 2 * self.block * p.kv_heads * p.token_bytes
        widened = columns * (p.dim + p.value_dim) * (8 if p.is_eight_bit else 4)
        nodes = 0
        if p.tree_columns:  # marks, and a mask of tokens, from which a mask of heads is made
            tokens = -(-p.tokens // 16) * 16
            nodes = tokens * (2 * 4 * trees.node_lanes(p) + 2 * 4 * columns)
        return caches + 5 * 4 * rows * columns + widened + nodes


def page_rows(p: PagedProblem, tokens: int) -> int:
    """Rows of a page as the kernel reads it: one for each token and kv head."""
    return tokens * p.kv_heads


def refusal(p: PagedProblem, names: tuple[str, ...], smallest: Tiles, chip: Chip) -> str | None:
    """Returns the reason why a cache with arrays of these names is not supported, or None.

    ``smallest``: the least tiles that such a cache allows.
    """
    if p.query_dtype not in QUERY_DTYPES:
        return f"query: {p.query_dtype} is not supported, only {' and '.join(QUERY_DTYPES)}"
    caches = (p.key_dtype, p.dim), (p.value_dtype, p.value_dim)
    for name, (dtype, dim) in zip(names, caches, strict=False):
        if dtype not in CACHE_DTYPES:
            return f"{name}: {dtype} is not supported, only {', '.join(CACHE_DTYPES)}"
        if dim % LANES:
            # XLA would have to copy the cache into another memory layout
            return f"{name}: head dim {dim} is no multiple of {LANES}"
        if dim > LANES and p.kv_heads > 1 and p.kv_heads % 8:
            heads = f"{p.kv_heads} kv heads of {dim}"
            return f"{name}: {heads} are not supported: 1 or a multiple of 8 above {LANES}"
        unit = max(32 // ITEMSIZE[dtype], 16)
        if page_rows(p, p.page_size) % unit:
            rows = page_rows(p, p.page_size)
            return f"{name}: {rows} rows of a page, tokens times heads, are no multiple of {unit}"
    if smallest.vmem(p) > chip.tile_memory:
        return f"{names[0]}: pages of {p.page_size} tokens are too large for vector memory"
    return None


def max_columns(p: PagedProblem) -> int:
    """Returns the largest number of columns of a score tile."""
    return min(MAX_COLUMNS, MAX_SCORES // (p.tokens * p.heads))


def choose(p: PagedProblem, chip: Chip) -> Tiles:
    """Returns pages of about ``BLOCK_BYTES`` together."""
    page_bytes = p.page_size * p.kv_heads * p.token_bytes
    columns = p.page_size * p.kv_heads
    most = min(BLOCK_BYTES // page_bytes, max_columns(p) // columns, p.max_pages)
    t = Tiles(max(most, 1), p.page_size)
    while t.pages > 1 and t.vmem(p) > chip.tile_memory:
        t = Tiles(t.pages // 2, t.tokens)
    return t


def neighbours(p: PagedProblem, chip: Chip, t: Tiles) -> list[Tiles]:
    """Returns tiles with half and twice the pages."""
    return [Tiles(n, t.tokens) for n in (t.pages // 2, 2 * t.pages) if 1 <= n <= p.max_pages]
