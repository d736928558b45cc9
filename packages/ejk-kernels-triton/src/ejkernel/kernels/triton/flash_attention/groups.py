"""What flash attention's kernels take, in groups that all of them share.

Fields in capitals are constants of a compiled kernel, the others operands and numbers of a call.
What a call has not is None, which is a constant too: kernels ask for it and nothing else. No field
is named ``values`` or ``type``: Triton's own tuples have those.

Fields of a launch lie in memory in their order, as do groups in that of a kernel's parameters. Two
numbers of a loop that share eight aligned bytes are loaded at once, and ptxas then schedules the
whole loop anew: ``hi`` beside ``slope`` cost the forward kernel 4% on an H200. So numbers that many
calls have come first, and those that pair are the ones that paired when this was measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.common.dims import split_dim

Given = Any  # an operand or a result of a launch; in a kernel a pointer or a descriptor


class Part(NamedTuple):
    """Some columns of a head, held as WIDTH, a power of two: from FIRST on, at most USED."""

    FIRST: int
    USED: int
    WIDTH: int
    PADDED: bool  # columns of the last one that are not there


class Heads(NamedTuple):
    """An array of heads of ALL columns, in parts of them, read by tiles of ROWS rows.

    A part has a descriptor, or the pointer, of its own: addresses made from one pointer would stay
    in registers from one part to the other.
    """

    arrays: tuple[Given, ...]
    ALL: int
    PARTS: tuple[Part, ...]
    ROWS: int
    TMA: bool


def parts_of(dim: int) -> tuple[Part, ...]:
    """Of a head of ``dim`` columns: one power of two or two (80 = 64 + 16)."""
    main, rest = split_dim(dim)
    if rest == 0:
        return (Part(0, dim, main, main > dim),)
    return Part(0, main, main, False), Part(main, dim - main, rest, main + rest > dim)


class Sizes(NamedTuple):
    """Of the arrays of a call."""

    q_len: int
    kv_len: int
    heads: int
    kv_heads: int


class Pairs(NamedTuple):
    """Values of queries and of keys that say what sees what; STRIDE 0 is one row for all."""

    q: Given
    kv: Given
    stride: int


class Elements(NamedTuple):
    """A mask of pairs, an element for ROWS rows and KEYS keys; strides in elements.

    WORD: elements are int32 for this many keys, a tile's, with a bit for each KEYS of them.
    """

    array: Given
    batch: int
    head: int
    ROWS: int
    KEYS: int
    WORD: int


class Rules(NamedTuple):
    """What a row sees: a band of keys, equal segments, a band and chunks of positions, a mask.

    Chunks are of indices where there are no positions.
    """

    lo: int | None
    hi: int | None
    position_lo: int | None
    position_hi: int | None
    chunk: int | None
    chunk_offset: int | None
    segments: Pairs | None
    positions: Pairs | None
    mask: Elements | None


class Bias(NamedTuple):
    """A bias; strides in rows."""

    batch: int
    array: Given
    head: int
    TMA: bool


class Dropout(NamedTuple):
    """Words of the rows, what they are compared with, and the factor of what is kept."""

    words: Given
    threshold: int
    scale: float


class Walk(NamedTuple):
    """How programs are numbered, and which blocks one of them visits.

    ``blocks``: programs of a head; ``batch``: batch rows. ``order``: numbers of programs, where not
    in order. A list of blocks or their ranges, where the band does not say them, and their rows
    from one batch row and from one head to the next.
    """

    blocks: int
    batch: int
    order: Given
    listed: Given
    ranges: Given
    batch_step: int
    head_step: int
    FULL: bool  # blocks that need no element mask are walked apart
    PARTIAL: bool  # any block needs one
    LAST_FIRST: bool
    NEIGHBOURS: int  # see ``program_of``


class Logits(NamedTuple):
    """From products to logits, see ``tile_logits``; None where nothing is multiplied.

    ``gradient``: what sums of a backward kernel are multiplied by. FUSED: lse is in base 2, as a
    soft cap bounds the logits.
    """

    scale: float | None
    slope: float
    gradient: float | None
    cap: float | None
    FUSED: bool


class Softmax(NamedTuple):
    """What only the forward kernel needs to sum, see there and ``fused_softmax``.

    FIXED: ``peak`` takes the place of running maxima.
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

    array: Given
    batch: int
