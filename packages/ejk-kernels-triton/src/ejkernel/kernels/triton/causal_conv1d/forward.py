"""The convolution, and the last tokens of every sequence.

    z_t = bias + sum_i weight_i x_{t-w+1+i}        y_t = z_t or z_t sigmoid(z_t)

Work split: a program has SEGMENT tokens of CHANNELS channels of one sequence. A thread has the same
channels of every token and keeps the last w - 1 tokens in registers, so that every token is loaded
once. Packed sequences are cut into the pieces of ``common.sequences``: a program belongs to one
sequence, and no table is needed.

Bound: x is read and y is written once: memory. 2 x 8192 tokens of 8192 channels in bfloat16:
537 MB, 0.125 ms at the 4.3 TB/s at which an H200 copies. Sigmoids take half of that time (two
special functions an element).

Source: the depthwise convolution of Gu and Dao 2023, "Mamba" (arXiv 2312.00752), section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.causal_conv1d.segments import (
    find_position,
    in_channels,
    load_history,
    load_taps,
    load_tokens,
    sigmoid,
    sizes_of,
    tap_sum,
)
from ejkernel.kernels.triton.causal_conv1d.tiles import STEP, Tiles
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, SHARED, Launch, struct
from ejkernel.types.problems.convolution import ConvolutionProblem


@triton.jit
def convolve(x, weight, bias, initial_state, cu, y, state, sizes, SILU: tl.constexpr):
    """Convolves the tokens of a segment, in a block of channels; writes the last state."""
    WIDTH: tl.constexpr = sizes.WIDTH
    position = find_position(cu, sizes)
    batch, last, valid = position.batch, position.last, position.valid
    channel = position.block * sizes.CHANNELS + tl.arange(0, sizes.CHANNELS)
    inside = in_channels(channel, sizes)
    x += batch * sizes.rows * sizes.ALL_CHANNELS
    y += batch * sizes.rows * sizes.ALL_CHANNELS
    state_offset = position.state * sizes.ALL_CHANNELS * (WIDTH - 1)
    states = None
    if initial_state is not None:
        states = initial_state + state_offset
    taps, shift = load_taps(weight, bias, batch, channel, inside, sizes)
    history = load_history(x, states, position.first, position, channel, inside, sizes)
    for t in range(position.first, last, sizes.STEP):
        tokens = history + load_tokens(x, t, last, position, channel, inside, sizes)
        for j in tl.static_range(sizes.STEP):
            z = tap_sum(taps, shift, tokens, j, sizes)
            if SILU:
                z = z * sigmoid(z)
            z = tl.where(valid, z, 0.0)
            row = y + tl.cast(t + j, tl.int64) * sizes.ALL_CHANNELS
            tl.store(row + channel, z.to(y.dtype.element_ty), mask=inside & (t + j < last))
        history = tokens[sizes.STEP :]
    if position.ends:
        final = load_history(x, states, position.stop, position, channel, inside, sizes)
        for i in tl.static_range(WIDTH - 1):
            pointers = state + state_offset + channel * (WIDTH - 1) + i
            tl.store(pointers, final[i].to(state.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class ConvolveLaunch(Launch):
    """Launch of ``convolve``; the results are y and the states ``[states, channels, w - 1]``."""

    kernel = convolve
    batching: ClassVar = {
        "x": BATCHED,
        "weight": SHARED,
        "bias": SHARED,
        "initial_state": BATCHED,
        "cu": BATCHED,
    }

    problem: ConvolutionProblem
    tiles: Tiles

    def outputs(self):
        p = self.problem
        return {
            "y": struct(p.dtype, p.batch, p.rows, p.channels),
            "state": struct(p.dtype, p.states, p.channels, p.width - 1),
        }

    def grid(self, target):
        return (self.tiles.programs(self.problem),)

    def arguments(self, target):
        return {
            "sizes": sizes_of(self, STEP),
            "SILU": self.problem.silu,
        }
