"""The position of a program of the convolution, and the tokens and taps that it loads."""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.common.sequences import find_piece, lane_count
from ejkernel.kernels.triton.common.softmax import LOG2E
from ejkernel.kernels.triton.language import tl, triton


class Sizes(NamedTuple):
    """Sizes of the arrays; fields in capitals are constants of a compiled kernel.

    Attributes:
        rows: tokens of a batch row.
        sequences: packed sequences of a batch row, 0: one sequence.
        segments: segments of a batch row.
        weight_batch, bias_batch: elements from one batch row to the next, 0: one for all.
        ALL_CHANNELS: channels of a token; a constant, so that tokens lie at constant distances.
        SEGMENT, CHANNELS: tokens and channels of a program.
        STEP: tokens loaded together.
        WIDTH: number of taps.
        LANES: sequences searched together.
        EVEN: whether every segment has whole steps, each of more tokens than a sum reads before it.
    """

    rows: int
    sequences: int
    segments: int
    weight_batch: int
    bias_batch: int
    ALL_CHANNELS: int
    SEGMENT: int
    STEP: int
    CHANNELS: int
    WIDTH: int
    LANES: int
    EVEN: bool


def sizes_of(launch: Any, step: int) -> Sizes:
    """Returns the sizes of a launch that loads ``step`` tokens together."""
    p, t = launch.problem, launch.tiles
    step = min(step, t.segment)
    even = not p.sequences and p.rows % step == 0 and t.segment % step == 0 and p.width <= step
    shared = {name: (launch.shape(name) or (1,))[0] == 1 for name in ("weight", "bias")}
    return Sizes(
        p.rows,
        p.sequences,
        t.segments(p),
        weight_batch=0 if shared["weight"] else p.channels * p.width,
        bias_batch=0 if shared["bias"] else p.channels,
        ALL_CHANNELS=p.channels,
        SEGMENT=t.segment,
        STEP=step,
        CHANNELS=t.channels,
        WIDTH=p.width,
        LANES=lane_count(p.sequences),
        EVEN=even,
    )


class SegmentPosition(NamedTuple):
    """The position of a program: a segment of one sequence, and a block of channels.

    Attributes:
        segment: number of the segment, counted over all batch rows.
        block: block of channels.
        batch: batch row.
        state: number of the sequence's state.
        valid: whether the tokens belong to a sequence.
        start, stop: first token of the sequence, and the token past its last.
        first, last: first token of the segment, and the token past its last.
        ends: whether the sequence ends in the segment.
    """

    segment: Any
    block: Any
    batch: Any
    state: Any
    valid: Any
    start: Any
    stop: Any
    first: Any
    last: Any
    ends: Any


@triton.jit
def find_position(cu, sizes):
    """Returns the ``SegmentPosition`` of this program."""
    across = (sizes.ALL_CHANNELS + sizes.CHANNELS - 1) // sizes.CHANNELS
    program = tl.program_id(0)
    block = program % across
    segment = program // across
    batch = (segment // sizes.segments).to(tl.int64)
    piece = segment % sizes.segments
    if cu is None:
        state = batch
        start = 0
        stop = sizes.rows
        tile = piece * sizes.SEGMENT
        valid = piece >= 0
        ends = piece == sizes.segments - 1
    else:
        sequence, start, stop, tile = find_piece(
            cu + batch * (sizes.sequences + 1), sizes.sequences, sizes.rows, piece, sizes.SEGMENT,
            sizes.LANES,
        )  # fmt: skip
        state = batch * sizes.sequences + sequence
        valid = sequence < sizes.sequences
        # a sequence that ends with its tile has one more segment, without tokens
        ends = valid & (stop < tile + sizes.SEGMENT)
    first = tl.maximum(start, tile)
    last = tl.minimum(stop, tile + sizes.SEGMENT)
    return SegmentPosition(segment, block, batch, state, valid, start, stop, first, last, ends)


@triton.jit
def in_channels(channel, sizes):
    """Returns which of the channels exist."""
    return (channel < sizes.ALL_CHANNELS) | (sizes.ALL_CHANNELS % sizes.CHANNELS == 0)


@triton.jit
def load_taps(weight, bias, batch, channel, inside, sizes):
    """Returns the taps of every channel, the earliest token's first, and the bias, in float32."""
    weight += batch * sizes.weight_batch
    taps = ()
    for i in tl.static_range(sizes.WIDTH):
        tap = tl.load(weight + channel * sizes.WIDTH + i, mask=inside, other=0.0)
        taps += (tap.to(tl.float32),)
    shift = tl.zeros([sizes.CHANNELS], tl.float32)
    if bias is not None:
        at = bias + batch * sizes.bias_batch + channel
        shift = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return taps, shift


@triton.jit
def load_history(x, states, row, position, channel, inside, sizes):
    """Returns the WIDTH - 1 tokens before ``row``, those before the sequence from its state."""
    start = position.start
    valid = position.valid
    history = ()
    for i in tl.static_range(sizes.WIDTH - 1):
        t = row - (sizes.WIDTH - 1) + i
        token = load_token(x, t, valid & (t >= start), channel, inside, sizes)
        if states is not None:
            token += load_state(states, t, position, channel, inside, sizes)
        history += (token,)
    return history


@triton.jit
def load_state(states, t, position, channel, inside, sizes):
    """Returns the channels of token ``t`` of the initial state in float32, 0 where it has none."""
    at = t - position.start + sizes.WIDTH - 1
    before = inside & position.valid & (at >= 0) & (at < sizes.WIDTH - 1)
    pointers = states + channel * (sizes.WIDTH - 1) + at
    return tl.load(pointers, mask=before, other=0.0).to(tl.float32)


@triton.jit
def load_token(x, t, valid, channel, inside, sizes):
    """Returns the channels of token ``t`` in float32, 0 where it is not ``valid``."""
    row = x + tl.cast(t, tl.int64) * sizes.ALL_CHANNELS
    return tl.load(row + channel, mask=inside & valid, other=0.0).to(tl.float32)


@triton.jit
def load_tokens(x, t, stop, position, channel, inside, sizes):
    """Returns the STEP tokens starting at ``t``, 0 for those past the end ``stop``."""
    tokens = ()
    for j in tl.static_range(sizes.STEP):
        inside_token = position.valid & (t + j < stop)
        tokens += (load_token(x, t + j, inside_token, channel, inside, sizes),)
    return tokens


@triton.jit
def sigmoid(z):
    """Returns 1 / (1 + exp(-z)) within 5e-7, exact at both ends.

    The quotient as a squared reciprocal root: half the instructions of a division.
    """
    root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2E))
    return root * root


@triton.jit
def tap_sum(taps, shift, tokens, j: tl.constexpr, sizes):
    """Returns the bias plus the taps times ``tokens[j]`` to ``tokens[j + WIDTH - 1]``."""
    total = shift
    for i in tl.static_range(sizes.WIDTH):
        total += taps[i] * tokens[j + i]
    return total
