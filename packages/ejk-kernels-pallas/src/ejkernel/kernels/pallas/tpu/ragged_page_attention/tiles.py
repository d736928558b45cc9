"""Tiles of ragged attention on TPU, and the static properties of a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.pallas.tpu.common import trees
from ejkernel.kernels.pallas.tpu.common.chip import LANES, SUBLANES, Chip
from ejkernel.ops.params import config_field
from ejkernel.types.serving.problem import ITEMSIZE, PagedProblem, RaggedProblem

QUERY_DTYPES = ("bfloat16", "float32")
CACHE_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
# 2 MiB take 2.5 microseconds on v5e and 1.2 on v6e: long against the latency of a copy
BLOCK_BYTES = 2**21
MAX_TOKENS = 1024  # of a block: more keys spill more registers
STRIP = 512  # rows of a score tile: more spill, fewer do not hide the exponentials


@dataclass(frozen=True)
class Tiles:
    """Blocks of a call.

    Attributes:
        pages: pages of a block of keys. queries: new tokens of a block of queries.
    """

    pages: int
    queries: int

    @property
    def fields(self) -> dict[str, int]:
        """Returns the config fields of ragged attention."""
        return {"num_kv_pages_per_block": self.pages, "num_queries_per_block": self.queries}

    def apply_config(self, cfg: Any, problem: RaggedProblem, target: Chip) -> Tiles:
        """Returns these tiles with the sizes that a config gives, in whole registers."""
        pages = config_field(cfg, "num_kv_pages_per_block")
        queries = config_field(cfg, "num_queries_per_block")
        p = problem.paged
        return Tiles(
            self.pages if pages is None else whole_pages(p, int(pages)),
            self.queries if queries is None else max(int(queries) // 16, 1) * 16,
        )


@dataclass(frozen=True)
class Layout:
    """One launch: the call, its tiles and its TPU.

    A *word* is 32 bits of each lane: a row of a float32 cache, the key and the value of a head in
    bfloat16. Queries have ``width`` columns and ``group`` heads a kv head, zeros included.

    Attributes:
        writes: whether the call writes new keys and values to their pages.
    """

    problem: RaggedProblem
    tiles: Tiles
    chip: Chip
    writes: bool = False

    @property
    def paged(self) -> PagedProblem:
        return self.problem.paged

    @property
    def width(self) -> int:
        """Columns of a row of the cache."""
        return row_width(self.paged)

    @property
    def token_rows(self) -> int:
        """Rows of a token in the cache: keys and values interleaved, and padding."""
        return 2 * self.paged.layout.heads

    @property
    def group(self) -> int:
        """Query heads of a kv head, with heads of zeros so that all heads are whole registers."""
        return padded_group(self.paged)

    @property
    def heads(self) -> int:
        return self.group * self.paged.kv_heads

    @property
    def decode_rows(self) -> int:
        """Rows of a score tile of one token: heads of a kv head, in whole registers."""
        return -(-self.group // SUBLANES) * SUBLANES

    @property
    def rows(self) -> int:
        """Rows of a kv head in a block of queries."""
        return self.group * self.tiles.queries

    @property
    def strip(self) -> int:
        """Rows of a score tile of a block of queries, of some of its heads."""
        size = self.tiles.queries
        return size * max(n for n in range(1, self.group + 1) if self._fits_strip(n))

    def _fits_strip(self, heads: int) -> bool:
        return self.group % heads == 0 and (heads == 1 or heads * self.tiles.queries <= STRIP)

    @property
    def block(self) -> int:
        """Tokens of a block of keys."""
        return self.tiles.pages * self.paged.page_size

    @property
    def compute_dtype(self) -> str:
        return self.paged.query_dtype

    @property
    def lse_lanes(self) -> int:
        """Lanes of the log-sum-exp of a token: one for each head."""
        return -(-self.heads // LANES) * LANES

    @property
    def node_lanes(self) -> int:
        """Lanes of the marks of a row; 0 where rows are causal."""
        return trees.node_lanes(self.paged) if self.paged.tree_columns else 0

    def vmem(self) -> int:
        """Bytes of vector memory, about: buffers, converted heads, states and spills."""
        p, size = self.paged, ITEMSIZE[self.paged.query_dtype]
        token = self.token_rows * self.width
        caches = self.block * token * (2 * ITEMSIZE[p.key_dtype] + size)
        if p.is_eight_bit:
            caches += 2 * self.block * token
        queries = self.tiles.queries * self.heads * self.width
        rows = p.kv_heads * max(self.rows, self.decode_rows)
        states = rows * 4 * (self.width + 2 * LANES)
        spills = 12 * self.strip * self.block
        nodes = self.tiles.queries * self.node_lanes * 3 * 4
        return caches + queries * (5 * size + 8) + states + spills + nodes


def row_width(p: PagedProblem) -> int:
    """Returns the columns of a row of the cache."""
    return p.layout.key_stride // 2


def padded_group(p: PagedProblem) -> int:
    """Returns query heads of a kv head, more where all heads are no whole registers."""
    unit = SUBLANES // math.gcd(p.kv_heads, SUBLANES)
    return -(-p.group // unit) * unit


def whole_pages(p: PagedProblem, pages: int) -> int:
    """Returns about as many pages, whose tokens are whole registers of lanes."""
    unit = LANES // math.gcd(p.page_size, LANES)
    return max(pages // unit, 1) * unit


def unsupported_reason(
    problem: RaggedProblem, cache: str, chip: Chip, *, writes: bool
) -> str | None:
    """Returns why a call over ``cache``, the name of the argument, is not supported, or None."""
    p = problem.paged
    if p.query_dtype not in QUERY_DTYPES:
        return f"queries: {p.query_dtype} is not supported, only {' and '.join(QUERY_DTYPES)}"
    if p.key_dtype not in CACHE_DTYPES:
        return f"{cache}: {p.key_dtype} is not supported, only {', '.join(CACHE_DTYPES)}"
    if not p.heads or not p.dim:
        return "queries: without heads or columns"
    width, packing = row_width(p), 4 // ITEMSIZE[p.key_dtype]
    if width != LANES:
        # heads are read from a block by strided loads, which have this width
        return f"{cache}: rows of {width} columns are not supported, only {LANES}"
    words, odd = divmod(2 * p.layout.heads, packing)
    if odd or (words % SUBLANES and words not in (1, 2, 4)):
        heads = f"{p.layout.heads} kv heads of {p.key_dtype}"
        return f"{cache}: {heads} are not 1, 2, 4 or a multiple of 8 words of 32 bits"
    if writes:
        for name, dtype in zip(("keys", "values"), problem.written_dtypes, strict=True):
            if dtype not in ITEMSIZE:
                return f"{name}: {dtype} is not supported, only {', '.join(ITEMSIZE)}"
    smallest = Tiles(whole_pages(p, 1), 16)
    if Layout(problem, smallest, chip).vmem() > chip.tile_memory:
        return f"{cache}: pages of {p.page_size} tokens are too large for vector memory"
    return None


def choose(problem: RaggedProblem, chip: Chip) -> Tiles:
    """Returns blocks of about ``BLOCK_BYTES`` of keys, and of 1024 rows a kv head."""
    p = problem.paged
    token_bytes = p.layout.key_stride * p.layout.heads * ITEMSIZE[p.key_dtype]
    tokens = min(max(BLOCK_BYTES // token_bytes, LANES), MAX_TOKENS, p.capacity)
    # rows a key is used for: 561 operations a byte are the balance of v6e
    queries = max(1024 // padded_group(p) // 16, 1) * 16
    queries = min(queries, -(-problem.rows // 16) * 16, 256)
    if p.tree_columns:  # new tokens that no mark can name are of no use
        queries = min(queries, -(-p.tree_columns // 16) * 16)
    t = Tiles(whole_pages(p, tokens // p.page_size), queries)
    while Layout(problem, t, chip).vmem() > chip.tile_memory:
        smaller = replace(t, pages=whole_pages(p, t.pages // 2))
        # longer blocks of keys hide more of a step than more rows do
        if t.queries > 16 and (t.queries * padded_group(p) > STRIP // 2 or smaller == t):
            smaller = replace(t, queries=max(t.queries // 32, 1) * 16)
        if smaller == t:
            break
        t = smaller
    return t


def neighbours(problem: RaggedProblem, chip: Chip, t: Tiles) -> list[Tiles]:
    """Returns tiles with half and twice the pages, and half and twice the queries."""
    p = problem.paged
    others = [replace(t, pages=whole_pages(p, n)) for n in (t.pages // 2, 2 * t.pages)]
    others += [replace(t, queries=n) for n in (t.queries // 2, 2 * t.queries) if n >= 16]
    return [x for x in others if Layout(problem, x, chip).vmem() <= chip.tile_memory]
