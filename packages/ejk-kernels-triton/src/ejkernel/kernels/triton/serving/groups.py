"""Groups of the arguments that kernels over a cache take.

Fields in capitals are constants of a compiled kernel, the others operands and sizes of a call.
The order of fields is that of the launch, see ``flash_attention.groups``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Operand = Any  # an operand or a result of a launch; in a kernel a pointer or a descriptor


class HeadLayout(NamedTuple):
    """Layout of the keys or of the values in a token.

    Attributes:
        HEADS, STEP: heads of a token, and elements from one to the next.
        DIM: columns of a head.
        MAIN, TAIL: powers of two that cover DIM; TAIL is 0 if one is enough.
        KIND: dtype of 8-bit values, else "".
        CONVERT_ONCE: dtype of 8-bit values that are converted once for both matmuls, else None.
            KIND is "" then.
        DTYPE: dtype of matmuls.
    """

    HEADS: int
    STEP: int
    DIM: int
    MAIN: int
    TAIL: int
    KIND: str
    CONVERT_ONCE: str | None
    DTYPE: Any


class Cache(NamedTuple):
    """Keys and values in pages of PAGE tokens.

    Attributes:
        k, v: arrays, or descriptors of cache rows. ``v`` is None where a key holds its value.
        k_tail: descriptor of the columns of a key that are not its value, else None.
        V_OFFSET: first element of the values, in elements as they are read.
        K, V: layout of keys and of values.
    """

    k: Operand
    k_tail: Operand
    v: Operand
    PAGE: int
    V_OFFSET: int
    K: HeadLayout
    V: HeadLayout


class SequenceTables(NamedTuple):
    """Lengths of sequences, their pages, first visible keys, first query rows and row counts."""

    lens: Operand
    tables: Operand
    begins: Operand
    rows: Operand
    counts: Operand


class Scale(NamedTuple):
    """Factors of a cache, if it has any, and their strides over sequences and over heads."""

    array: Operand
    row: int
    head: int


class Sinks(NamedTuple):
    """Additional logits of each head, ``count`` or none; PADDED: count as a power of two."""

    array: Operand
    row: int
    count: int
    PADDED: int


class Tree(NamedTuple):
    """Marks of the new tokens that a row sees, as nodes of a tree.

    Attributes:
        words: of each row int32 whose bits are marks of the new tokens; None: rows are causal.
        positions: of each row, as a window counts; None: those in its sequence.
        count: words of a row, if there are any.
    """

    words: Operand
    positions: Operand
    count: int | None


class DecodeSizes(NamedTuple):
    """Sizes of a launch; ``left``: keys seen before a row, with WINDOW."""

    batch: int
    ranges: int
    max_pages: int
    pages: int
    left: int
    WINDOW: bool


class Logits(NamedTuple):
    """Factors from dot products to logits, see ``queries.prepare_queries``."""

    scale: float
    cap_in: float
    cap_out: float
    CAPPED: bool
    POSITIVE: bool


class Partial(NamedTuple):
    """Partial results of rows: unnormalised output, largest logit, sum of exponentials."""

    acc: Operand
    m: Operand
    l: Operand  # noqa: E741


class MergeAtEnd(NamedTuple):
    """Constants of a merge by the programs that store the partial results.

    Attributes:
        COLUMNS, CHUNKS: columns that are merged at once, and how often.
        PARTS: partial results that are loaded at once.
        MEMBERS: query rows that the last program merges at once; 0: all programs share them.
        POLLS: looks at a counter before a program gives up waiting for others.
    """

    COLUMNS: int
    CHUNKS: int
    PARTS: int
    MEMBERS: int
    POLLS: int


class RowLayout(NamedTuple):
    """Query rows of a sequence.

    Attributes:
        ALL, KV: query heads and kv heads.
        CHUNKS, BLOCK: programs for the rows of a kv head, and rows of each.
        TOKENS: query tokens of a sequence.
    """

    ALL: int
    KV: int
    CHUNKS: int
    BLOCK: int
    TOKENS: int


class DotOptions(NamedTuple):
    """Options of matmuls, see ``attend_block``.

    Attributes:
        FORM: form of scores with 8-bit keys that hold their values, see ``eight_bit_scores``. "":
            even and odd columns are separate matmuls.
        BIASED: whether int8 values are converted by ``convert_biased_pairs``.
        NORMALISE: whether queries are scaled to the range of float16.
        RAW_QUERIES: whether queries are multiplied as they are loaded.
        OPAQUE: whether warps are distributed along keys behind an opaque flag.
        FUSED: whether the softmax is ``fused_softmax``.
        PRECISION: precision of float32 matmuls.
    """

    FORM: str
    BIASED: bool
    NORMALISE: bool
    RAW_QUERIES: bool
    OPAQUE: bool
    FUSED: bool
    PRECISION: str


class PrefillSizes(NamedTuple):
    """Sizes of a prefill launch.

    Attributes:
        n, rows: sequences, and rows of all.
        programs: programs that compute.
        max_pages, pages: pages of a row of the block table, and of the cache.
        left, WINDOW: keys seen before a row, where there is a window.
        LANES: sequences that a program looks at together.
        CLEARED_ROWS: rows that a program sets to 0.
    """

    n: int
    rows: int
    programs: int
    max_pages: int
    pages: int
    left: int
    WINDOW: bool
    LANES: int
    CLEARED_ROWS: int


class TileLayout(NamedTuple):
    """Layout of rows in tiles: TILE tokens with MEMBERS query heads of a kv head, in ROWS rows."""

    HEADS: int
    KV_HEADS: int
    CHUNKS: int
    ROWS: int
    TILE: int
    MEMBERS: int
