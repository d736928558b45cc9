"""The gradients of the convolution: tokens, states, taps and bias.

    dz_t = dy_t act'(z_t)        dx_t = sum_i weight_i dz_{t+w-1-i} (+ the state's gradient)
    dweight_i = sum_t dz_t x_{t-w+1+i}        dbias = sum_t dz_t

Tokens of the initial state are tokens before the sequence: their gradient is dx there. The new
state holds the last w - 1 tokens, which take its gradient.

Work split: as in ``forward``, but a program takes the tokens of its segment from the last to the
first: dz of a token is then the last that its dx needs. A thread keeps w - 1 tokens and w - 1 dz of
the step before in registers: only the w - 1 dz after a segment are computed twice.
What a segment adds to the gradients of taps and bias is stored, and XLA adds the segments: there
are no atomics here, and two runs give the same bits.

Bound: x and dy are read, dx is written: memory. 2 x 8192 tokens of 8192 channels in bfloat16:
805 MB, 0.187 ms at the 4.3 TB/s at which an H200 copies. The last round of programs takes as long
as the others: segments of 512 tokens are one round. They store 0.6% more for taps and bias, read
1% more from the second-level cache. A step has 30 instructions an element on sm_90, 25 of them
arithmetic and conversions: 0.12 ms of all schedulers at 1.98 GHz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.causal_conv1d.segments import (
    find_position,
    in_channels,
    load_history,
    load_state,
    load_taps,
    load_token,
    sigmoid,
    sizes_of,
    tap_sum,
)
from ejkernel.kernels.triton.causal_conv1d.tiles import BACKWARD_STEP, Tiles
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, SHARED, Launch, struct
from ejkernel.types.problems.convolution import ConvolutionProblem


@triton.jit
def load_step(x, t, lowest, valid, channel, inside, sizes, WHOLE: tl.constexpr):
    """Returns the STEP tokens starting at ``t`` in their dtype, 0 for those before ``lowest``.

    None of the last WHOLE of them is.
    """
    row = x + tl.cast(t, tl.int64) * sizes.ALL_CHANNELS + channel
    tokens = ()
    for j in tl.static_range(sizes.STEP):
        mask = inside & valid
        if j < sizes.STEP - WHOLE:
            mask &= t + j >= lowest
        tokens += (tl.load(row + j * sizes.ALL_CHANNELS, mask=mask, other=0.0),)
    return tokens


@triton.jit
def sum_gradient(dy, tokens, taps, shift, j: tl.constexpr, sizes, SILU: tl.constexpr):
    """Returns the gradient of the sum over ``tokens[j]`` to ``tokens[j + WIDTH - 1]``."""
    dz = dy.to(tl.float32)
    if SILU:
        z = tap_sum(taps, shift, tokens, j, sizes)
        gate = sigmoid(z)
        dz *= gate + gate * (z - z * gate)
    return dz


@triton.jit
def token_gradient(dsums, taps, sizes):
    """Returns the gradient of a token, which its own sum and the sums after it read."""
    gradient = taps[sizes.WIDTH - 1] * dsums[0]
    for i in tl.static_range(1, sizes.WIDTH):
        gradient += taps[sizes.WIDTH - 1 - i] * dsums[i]
    return gradient


@triton.jit
def add_states(tokens, states, t, position, channel, inside, sizes):
    """Returns the STEP tokens starting at ``t``, those before the sequence from its state."""
    added = ()
    for j in tl.static_range(sizes.STEP):
        added += (tokens[j] + load_state(states, t + j, position, channel, inside, sizes),)
    return added


@triton.jit
def load_dstate(dstate, t, position, channel, inside, sizes):
    """Returns the gradient of the last state where token ``t`` is in it, else 0."""
    at = t - position.stop + sizes.WIDTH - 1
    in_state = inside & position.valid & (at >= 0) & (at < sizes.WIDTH - 1)
    pointers = dstate + channel * (sizes.WIDTH - 1) + at
    return tl.load(pointers, mask=in_state, other=0.0).to(tl.float32)


@triton.jit
def store_dinitial(gradient, dinitial, t, position, channel, inside, sizes):
    """Writes the gradient of token ``t`` where it is in the initial state."""
    at = t - position.start + sizes.WIDTH - 1
    in_state = inside & position.valid & (at >= 0) & (at < sizes.WIDTH - 1)
    in_state &= position.first == position.start
    tl.store(dinitial + channel * (sizes.WIDTH - 1) + at, gradient, mask=in_state)


@triton.jit
def convolve_backward(
    x, weight, bias, initial_state, dy, dstate, cu, dx, dinitial, partials, sizes,
    SILU: tl.constexpr,
):  # fmt: skip
    """Writes dx of a segment and block of channels, and its terms of dweight and dbias."""
    WIDTH: tl.constexpr = sizes.WIDTH
    STEP: tl.constexpr = sizes.STEP
    BEFORE: tl.constexpr = WIDTH - 1
    # of a step's tokens, and of those that the sums of a step load, how many are in the segment
    WHOLE: tl.constexpr = STEP if sizes.EVEN else 0
    WHOLE_X: tl.constexpr = max(STEP - BEFORE, 0) if sizes.EVEN else 0
    position = find_position(cu, sizes)
    first, last, valid = position.first, position.last, position.valid
    start, stop = position.start, position.stop
    channel = position.block * sizes.CHANNELS + tl.arange(0, sizes.CHANNELS)
    inside = in_channels(channel, sizes)
    rows = position.batch * sizes.rows * sizes.ALL_CHANNELS
    x += rows
    dy += rows
    dx += rows
    state_offset = position.state * sizes.ALL_CHANNELS * BEFORE
    states = None
    if initial_state is not None:
        states = initial_state + state_offset
        dinitial += state_offset
    if dstate is not None:
        dstate += state_offset
    taps, shift = load_taps(weight, bias, position.batch, channel, inside, sizes)

    zero = tl.zeros([sizes.CHANNELS], tl.float32)
    dtaps = ()
    for _i in tl.static_range(WIDTH):
        dtaps += (zero,)
    dshift = zero
    # dz of the tokens after the segment, on which the gradients of its last tokens depend
    history = load_history(x, states, last, position, channel, inside, sizes)
    after = history
    dafter = ()
    for j in tl.static_range(BEFORE):
        in_sequence = valid & (last + j < stop)
        after += (load_token(x, last + j, in_sequence, channel, inside, sizes),)
        dafter += (load_token(dy, last + j, in_sequence, channel, inside, sizes),)
    dsums = ()
    for j in tl.static_range(BEFORE):
        dsums += (sum_gradient(dafter[j], after, taps, shift, j, sizes, SILU),)

    # a step has STEP tokens and loads what their sums read: the w - 1 tokens before them too, of
    # which the step before has loaded the last
    if cu is None:
        t = last - STEP
        next_tokens = load_step(x, t - BEFORE, start, valid, channel, inside, sizes, WHOLE_X)
        next_dtokens = load_step(dy, t, first, valid, channel, inside, sizes, WHOLE)
    for n in range(0, last - first, STEP):
        t = last - STEP - n
        if cu is None:
            # a step ahead: too few programs fit on a multiprocessor to wait for each other's loads
            stored = next_tokens
            dtokens = next_dtokens
            ahead = t > first
            next_tokens = load_step(
                x, t - STEP - BEFORE, start, ahead, channel, inside, sizes, WHOLE_X
            )
            next_dtokens = load_step(dy, t - STEP, first, ahead, channel, inside, sizes, WHOLE)
        else:
            # with the search of sequences these would take the registers of a third of the warps
            stored = load_step(x, t - BEFORE, start, valid, channel, inside, sizes, WHOLE_X)
            dtokens = load_step(dy, t, first, valid, channel, inside, sizes, WHOLE)
        tokens = ()
        for j in tl.static_range(STEP):
            tokens += (stored[j].to(tl.float32),)
        if states is not None:
            if t - BEFORE < start:
                tokens = add_states(tokens, states, t - BEFORE, position, channel, inside, sizes)
        tokens += history
        out = dx + tl.cast(t, tl.int64) * sizes.ALL_CHANNELS + channel
        for j in tl.static_range(STEP - 1, -1, -1):
            dz = sum_gradient(dtokens[j], tokens, taps, shift, j, sizes, SILU)
            dsums = (dz,) + dsums  # noqa: RUF005
            dshift += dz
            added = ()
            for i in tl.static_range(WIDTH):
                added += (dtaps[i] + dz * tokens[j + i],)
            dtaps = added
            gradient = token_gradient(dsums, taps, sizes)
            if dstate is not None:
                gradient += load_dstate(dstate, t + j, position, channel, inside, sizes)
            mask = inside
            if not sizes.EVEN:
                mask &= t + j >= first
            tl.store(out + j * sizes.ALL_CHANNELS, gradient.to(dx.dtype.element_ty), mask=mask)
            if dinitial is not None:
                store_dinitial(gradient, dinitial, t + j, position, channel, inside, sizes)
        history = tokens[:BEFORE]
        dsums = dsums[:BEFORE]

    if dinitial is not None:
        # tokens before the last step, whose own dz is 0
        t = last - (last - first + STEP - 1) // STEP * STEP - 1
        for j in tl.static_range(BEFORE):
            dsums = (zero,) + dsums  # noqa: RUF005
            gradient = token_gradient(dsums, taps, sizes)
            if dstate is not None:
                gradient += load_dstate(dstate, t - j, position, channel, inside, sizes)
            store_dinitial(gradient, dinitial, t - j, position, channel, inside, sizes)

    COUNT: tl.constexpr = WIDTH if bias is None else WIDTH + 1
    partials += tl.cast(position.segment, tl.int64) * (COUNT * sizes.ALL_CHANNELS) + channel
    for i in tl.static_range(WIDTH):
        tl.store(partials + i * sizes.ALL_CHANNELS, dtaps[i], mask=inside)
    if bias is not None:
        tl.store(partials + WIDTH * sizes.ALL_CHANNELS, dshift, mask=inside)


@dataclass(frozen=True)
class ConvolveBackwardLaunch(Launch):
    """Launch of ``convolve_backward``.

    The results are dx, dinitial ``[states, channels, w - 1]`` where there is an initial state, and
    what every segment adds to the gradients of the taps and of the bias, which comes last:
    ``[segments of all batch rows, w or w + 1, channels]``.
    """

    kernel = convolve_backward
    batching: ClassVar = {
        "x": BATCHED,
        "weight": SHARED,
        "bias": SHARED,
        "initial_state": BATCHED,
        "dy": BATCHED,
        "dstate": BATCHED,
        "cu": BATCHED,
    }

    problem: ConvolutionProblem
    tiles: Tiles

    def outputs(self):
        p, t = self.problem, self.tiles
        initial = struct("float32", p.states, p.channels, p.width - 1)
        count = p.width + self.has("bias")
        return {
            "dx": struct(p.dtype, p.batch, p.rows, p.channels),
            "dinitial": initial if self.has("initial_state") else None,
            "partials": struct("float32", p.batch * t.segments(p), count, p.channels),
        }

    def grid(self, target):
        return (self.tiles.programs(self.problem),)

    def arguments(self, target):
        return {"sizes": sizes_of(self, BACKWARD_STEP), "SILU": self.problem.silu}
