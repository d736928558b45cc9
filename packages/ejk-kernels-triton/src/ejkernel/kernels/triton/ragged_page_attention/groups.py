"""Groups of the prefill kernel, in addition to the groups of paged decoding."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
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


class Layout(NamedTuple):
    """Layout of rows in tiles: TILE tokens with MEMBERS query heads of a kv head, in ROWS rows."""

    HEADS: int
    KV_HEADS: int
    CHUNKS: int
    ROWS: int
    TILE: int
    MEMBERS: int
