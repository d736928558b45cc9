"""Parameter groups that the kernels of flash attention share.

Fields in capitals are compile-time constants, the others operands and scalars of a call. A feature
that a call does not use is None, which is a constant too and is all that kernels test. No field is
named ``values`` or ``type``: Triton's own tuples have those.

Fields lie in constant memory in their order, and groups in the order of a kernel's parameters. Two
scalars of a loop that share eight aligned bytes are loaded together, and ptxas then schedules the
whole loop differently: ``hi`` next to ``slope`` cost the forward kernel 4% on an H200. So scalars
that many calls have come first, and the pairs are the ones that were measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.common.dims import split_dim

Operand = Any  # an operand or a result of a launch; in a kernel a pointer or a descriptor


class Part(NamedTuple):
    """USED columns of a head, starting at FIRST, in a tile of WIDTH columns, a power of two."""

    FIRST: int
    USED: int
    WIDTH: int
    PADDED: bool  # the tile has columns past the head dim


class Heads(NamedTuple):
    """An array of heads of ALL columns, read in parts by tiles of ROWS rows.

    Every part has its own pointer or descriptor: addresses derived from one pointer would stay in
    registers from one part to the next.
    """

    arrays: tuple[Operand, ...]
    ALL: int
    PARTS: tuple[Part, ...]
    ROWS: int
    TMA: bool
    STRIDE: int = 0  # of a column, where tokens are innermost: ``[batch, heads, ALL, STRIDE]``


def split_columns(dim: int) -> tuple[Part, ...]:
    """Returns the parts of a head of ``dim`` columns: one power of two or two (80 = 64 + 16)."""
    main, tail = split_dim(dim)
    if tail == 0:
        return (Part(0, dim, main, main > dim),)
    return Part(0, main, main, False), Part(main, dim - main, tail, main + tail > dim)


class Sizes(NamedTuple):
    """Sizes of the arrays of a call."""

    q_len: int
    kv_len: int
    heads: int
    kv_heads: int


class Scales(NamedTuple):
    """Scales of 8-bit operands: of blocks of Q_BLOCK queries and K_BLOCK keys, and of values.

    Every head has q_blocks, k_blocks and one of them; K_BLOCK 0: one of keys too.
    """

    q: Operand
    k: Operand
    v: Operand
    q_blocks: int
    k_blocks: int
    Q_BLOCK: int
    K_BLOCK: int
    PROBABILITY_FACTOR: float | None  # factor of probabilities before they are rounded to 8 bits


class SegmentPair(NamedTuple):
    """Segment ids or positions of queries and keys; ``stride`` 0: one row for the whole batch."""

    q: Operand
    kv: Operand
    stride: int


class DenseMask(NamedTuple):
    """A mask with an element for every ROWS rows and KEYS keys; strides in elements.

    WORD, if not 0: elements are int32 words for WORD keys (a tile), with a bit for every KEYS keys.
    """

    array: Operand
    batch: int
    head: int
    ROWS: int
    KEYS: int
    WORD: int


class Rules(NamedTuple):
    """Visibility of keys: a band, equal segments, a band and chunks of positions, a mask.

    Without positions chunks are chunks of indices.
    """

    lo: int | None
    hi: int | None
    position_lo: int | None
    position_hi: int | None
    chunk: int | None
    chunk_offset: int | None
    segments: SegmentPair | None
    positions: SegmentPair | None
    mask: DenseMask | None


class Bias(NamedTuple):
    """A bias; strides in rows."""

    batch: int
    array: Operand
    head: int
    TMA: bool


class Dropout(NamedTuple):
    """Hash words of the rows, the threshold they are compared with, and the dropout scale."""

    words: Operand
    threshold: int
    scale: float


class Mods(NamedTuple):
    """Device functions of a score_mod and a mask_mod, see ``mods``, and the arrays that they read.

    ``batch``: batch rows of a call, of which ``vmap`` has made several.
    """

    batch: int
    score_arrays: tuple[Operand, ...] | None
    mask_arrays: tuple[Operand, ...] | None
    SCORE: Any
    SLOPE: Any
    MASK: Any


class BlockSchedule(NamedTuple):
    """Numbering of the programs, and the blocks that each of them visits.

    ``blocks``: programs of a head; ``batch``: batch rows. ``order``: a permutation of the programs,
    or None. ``listed`` or ``ranges``: lists of blocks or their ranges where the band does not give
    them, with their strides from one batch row and from one head to the next, in rows.
    """

    blocks: int
    batch: int
    order: Operand
    listed: Operand
    ranges: Operand
    batch_step: int
    head_step: int
    FULL: bool  # blocks that need no element mask have a loop of their own
    PARTIAL: bool  # some block needs an element mask
    LAST_FIRST: bool
    NEIGHBOURS: int  # see ``program_of``


class Logits(NamedTuple):
    """Factors that turn q k^T into logits, see ``tile_logits``; None: no multiplication.

    ``gradient``: factor of a backward kernel's accumulators. FUSED: lse is in base 2, as a soft cap
    bounds the logits.
    """

    scale: float | None
    slope: float
    gradient: float | None
    cap: float | None
    FUSED: bool


class Softmax(NamedTuple):
    """Softmax parameters of the forward kernel, see there and ``fused_softmax``.

    FIXED: ``peak`` replaces the running maxima.
    """

    peak: float | None
    power: float | None
    large: float | None
    unit: float
    shift: float
    FIXED: bool
    MULTIPLY_ADD: bool


class Sinks(NamedTuple):
    """One more logit for each head; stride in elements."""

    array: Operand
    batch: int
