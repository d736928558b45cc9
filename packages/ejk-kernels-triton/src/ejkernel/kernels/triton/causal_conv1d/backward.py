"""The gradients of the convolution: tokens, states, taps and bias.

    dz_t = dy_t act'(z_t)        dx_t = sum_i weight_i dz_{t+w-1-i} (+ the state's gradient)
    dweight_i = sum_t dz_t x_{t-w+1+i}        dbias = sum_t dz_t

Tokens of the initial state are tokens before the sequence: their gradient is dx there. The new
state holds the last w - 1 tokens, which take its gradient.

Work split: as in ``forward``, over the tokens of the segment and the w - 1 after it, for which z is
computed again. A thread keeps the last w - 1 tokens and the last w - 1 dz in registers. What a
segment adds to the gradients of taps and bias is stored, and XLA adds the segments: there are no
atomics here, and two runs give the same bits.

Bound: x and dy are read, dx is written: memory. 2 x 8192 tokens of 8192 channels in bfloat16:
805 MB, 0.187 ms at the 4.3 TB/s at which an H200 copies. Segments of 128 tokens store 2.6% more for
taps and bias. Tokens that two segments read come from the second-level cache: 2% more of its
traffic. A step has 38 instructions an element, 26 of them arithmetic, on sm_90: 0.15 ms of all
schedulers at 1.98 GHz. Steps without masks would have 34, in registers of a quarter of the warps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.causal_conv1d.segments import (
    find_position,
    load_history,
    load_taps,
    load_tokens,
    sigmoid,
    sizes_of,
    tap_sum,
)
from ejkernel.kernels.triton.causal_conv1d.tiles import BACKWARD_STEP, Tiles
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, SHARED, Launch, struct
from ejkernel.types.problems.convolution import ConvolutionProblem


@triton.jit
def convolve_backward(
    x, weight, bias, initial_state, dy, dstate, cu, dx, dinitial, partials, sizes,
    SILU: tl.constexpr,
):  # fmt: skip
    """Writes dx of a segment and block of channels, and its terms of dweight and dbias."""
    WIDTH: tl.constexpr = sizes.WIDTH
    STEP: tl.constexpr = sizes.STEP
    BEFORE: tl.constexpr = WIDTH - 1
    position = find_position(cu, sizes)
    first, last, valid = position.first, position.last, position.valid
    start, stop = position.start, position.stop
    channel = position.block * sizes.CHANNELS + tl.arange(0, sizes.CHANNELS)
    inside = channel < sizes.channels
    rows = position.batch * sizes.rows * sizes.channels
    x += rows
    dy += rows
    dx += rows
    state_offset = position.state * sizes.channels * BEFORE
    states = None
    if initial_state is not None:
        states = initial_state + state_offset
    taps, shift = load_taps(weight, bias, position.batch, channel, inside, sizes)

    zero = tl.zeros([sizes.CHANNELS], tl.float32)
    history = load_history(x, states, first, position, channel, inside, sizes)
    dhistory = ()  # dz of tokens before the segment, on which none of its gradients depends
    dtaps = ()
    for _i in tl.static_range(BEFORE):
        dhistory += (zero,)
    for _i in tl.static_range(WIDTH):
        dtaps += (zero,)
    dshift = zero
    # dx_t needs dz up to w - 1 tokens later: a step loads tokens t, t + 1, ... and stores dx of
    # tokens t - w + 1, t - w + 2, ...
    if cu is None:
        next_tokens = load_tokens(x, first, stop, position, channel, inside, sizes)
        next_dtokens = load_tokens(dy, first, stop, position, channel, inside, sizes)
    for t in range(first, last + BEFORE, STEP):
        if cu is None:
            # a step ahead: too few programs fit on a multiprocessor to wait for each other's loads
            tokens = history + next_tokens
            dtokens = next_dtokens
            next_tokens = load_tokens(x, t + STEP, stop, position, channel, inside, sizes)
            next_dtokens = load_tokens(dy, t + STEP, stop, position, channel, inside, sizes)
        else:
            # with the search of sequences these would take the registers of a third of the warps
            tokens = history + load_tokens(x, t, stop, position, channel, inside, sizes)
            dtokens = load_tokens(dy, t, stop, position, channel, inside, sizes)
        for j in tl.static_range(STEP):
            dz = dtokens[j]
            if SILU:
                z = tap_sum(taps, shift, tokens, j, sizes)
                gate = sigmoid(z)
                dz = dz * (gate + z * gate * (1.0 - gate))
            dhistory += (dz,)
            counted = tl.where(t + j < last, dz, 0.0)
            dshift += counted
            added = ()
            for i in tl.static_range(WIDTH):
                added += (dtaps[i] + counted * tokens[j + i],)
            dtaps = added
        for j in tl.static_range(STEP):
            token = t + j - BEFORE
            gradient = zero
            for i in tl.static_range(WIDTH):
                gradient += taps[BEFORE - i] * dhistory[j + i]
            in_segment = (token >= first) & (token < last)
            before_sequence = valid & (token < start) & (first == start)
            if dstate is not None:
                in_state = valid & (token >= stop - BEFORE) & (token < stop)
                pointers = dstate + state_offset + channel * BEFORE + (token - stop + BEFORE)
                gradient += tl.load(pointers, mask=inside & in_state, other=0.0).to(tl.float32)
            row = dx + tl.cast(token, tl.int64) * sizes.channels
            tl.store(row + channel, gradient.to(dx.dtype.element_ty), mask=inside & in_segment)
            if dinitial is not None:
                pointers = dinitial + state_offset + channel * BEFORE + (token - start + BEFORE)
                tl.store(pointers, gradient, mask=inside & before_sequence)
        history = tokens[STEP:]
        dhistory = dhistory[STEP:]

    COUNT: tl.constexpr = WIDTH if bias is None else WIDTH + 1
    partials += tl.cast(position.segment, tl.int64) * (COUNT * sizes.channels) + channel
    for i in tl.static_range(WIDTH):
        tl.store(partials + i * sizes.channels, dtaps[i], mask=inside)
    if bias is not None:
        tl.store(partials + WIDTH * sizes.channels, dshift, mask=inside)


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
