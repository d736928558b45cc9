"""What kernels over a cache in pages take, in groups.

Fields in capitals are constants of a compiled kernel, the others operands and sizes of a call.
The order of fields is that of the launch, see ``flash_attention.groups``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Given = Any  # an operand or a result of a launch; in a kernel a pointer or a descriptor


class Side(NamedTuple):
    """The keys or the values of a cache: a token's HEADS heads, STEP elements from each other.

    A head has DIM columns, held as one or two powers of two. KIND: the dtype of 8-bit values, else
    "". ONCE: their dtype where they are converted once for both matmuls; KIND is "" then. NUMBER:
    the dtype of matmuls.
    """

    HEADS: int
    STEP: int
    DIM: int
    MAIN: int
    REST: int
    KIND: str
    ONCE: str | None
    NUMBER: Any


class Cache(NamedTuple):
    """Keys and values in pages of PAGE tokens.

    ``k_rest``: keys by descriptor, the columns behind those that are values too. ``v`` None: a key
    holds its value. V_FIRST: where values begin, in elements as they are read.
    """

    k: Given
    k_rest: Given
    v: Given
    PAGE: int
    V_FIRST: int
    K: Side
    V: Side


class Sequences(NamedTuple):
    """Lengths of sequences, their pages, first visible key, first query row and how many rows."""

    lens: Given
    tables: Given
    begins: Given
    rows: Given
    counts: Given


class Scale(NamedTuple):
    """A factor of a cache, if ``array`` is given; from sequence to sequence, head to head."""

    array: Given
    row: int
    head: int


class Sinks(NamedTuple):
    """``count`` more logits for each head if ``array`` is given, PADDED as a power of two."""

    array: Given
    row: int
    count: int
    PADDED: int


class DecodeSizes(NamedTuple):
    """Sizes of a launch; ``left``: keys seen before a row, with WINDOW."""

    batch: int
    shares: int
    max_pages: int
    pages: int
    left: int
    WINDOW: bool


class Logits(NamedTuple):
    """Factors from dot products to logits, see ``queries.opened``."""

    scale: float
    cap_in: float
    cap_out: float
    CAPPED: bool
    POSITIVE: bool


class Partial(NamedTuple):
    """Partial results of rows: unnormalised output, largest logit, sum of exponentials."""

    acc: Given
    m: Given
    l: Given  # noqa: E741


class Heads(NamedTuple):
    """ALL query heads and KV heads; the rows of a kv head in CHUNKS of BLOCK; TOKENS a sequence."""

    ALL: int
    KV: int
    CHUNKS: int
    BLOCK: int
    TOKENS: int


class Dots(NamedTuple):
    """Options of matmuls, with the PRECISION of float32; see ``attend_block``.

    FUSED: see ``fused_softmax``. FORM: of scores with 8-bit keys that hold their values, see
    ``eight_bit_scores``; "": even and odd columns apart. BIASED: their int8 values are
    multiplied as ``convert_biased_pairs``.
    """

    FORM: str
    BIASED: bool
    NORMALISE: bool
    RAW: bool
    APART: bool
    FUSED: bool
    PRECISION: str


class PrefillSizes(NamedTuple):
    """``n`` sequences, ``rows`` of all; programs of a launch; a table's and a cache's pages.

    ``left``: keys seen before a row, with WINDOW. LANES sequences are looked at together, LINES
    rows set to 0 by a program.
    """

    n: int
    rows: int
    programs: int
    max_pages: int
    pages: int
    left: int
    WINDOW: bool
    LANES: int
    LINES: int


class TileLayout(NamedTuple):
    """Layout of rows in tiles: TILE tokens with MEMBERS query heads of a kv head, in ROWS rows."""

    HEADS: int
    KV_HEADS: int
    CHUNKS: int
    ROWS: int
    TILE: int
    MEMBERS: int
