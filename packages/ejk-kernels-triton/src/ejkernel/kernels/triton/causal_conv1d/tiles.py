"""Tiles of the convolution: the heuristic, and the tiles worth timing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ejkernel.kernels.triton.common.sequences import piece_count
from ejkernel.kernels.triton.kernel import override_tiles
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.problems.convolution import ConvolutionProblem

FIELDS = {"segment": "token_tile", "channels": "channel_tile", "num_warps": "num_warps"}
LANES = 128  # channels of a warp: four per thread, 8 bytes of bfloat16
STEP, BACKWARD_STEP = 8, 4  # tokens loaded together
MIN_SEGMENT = 16
LONGER = (1, 2, 4, 8)  # times as many tokens in a segment of the backward launch
EXTRA_TOKENS = 16  # a backward segment takes the time of as many more: its halo, first loads, sums


@dataclass(frozen=True)
class Tiles:
    """Tiles of the forward and the backward launch.

    Attributes:
        segment: tokens of a program.
        channels: channels of a program.
    """

    segment: int
    channels: int
    num_warps: int
    num_stages: int = 1

    @property
    def fields(self) -> dict[str, int]:
        """Values of the config's fields."""
        return {theirs: getattr(self, mine) for mine, theirs in FIELDS.items()}

    def apply_config(self, cfg: Any, problem: ConvolutionProblem, target: Target) -> Tiles:
        """Returns these tiles with the values of a config."""
        return override_tiles(self, cfg, FIELDS)

    def backward(self, p: ConvolutionProblem, target: Target, has_state: bool) -> Tiles:
        """Returns the tiles of the backward launch, with segments as long or a few times longer.

        Programs that a multiprocessor has no room for wait for a round of their own, which takes as
        long as the others, however few they are: all rounds together are to be short.
        """
        warps = backward_warps(p, target, has_state) * target.cores
        at_once = max(1, warps // self.num_warps)

        def cost(t: Tiles) -> int:
            return -(-t.programs(p) // at_once) * (t.segment + EXTRA_TOKENS)

        return min((replace(self, segment=n * self.segment) for n in LONGER), key=cost)

    def segments(self, p: ConvolutionProblem) -> int:
        """Returns the number of segments of a batch row."""
        if p.sequences:
            return piece_count(p.rows, p.sequences, self.segment)
        return -(-p.rows // self.segment)

    def programs(self, p: ConvolutionProblem) -> int:
        """Returns the number of programs of a launch."""
        return p.batch * self.segments(p) * -(-p.channels // self.channels)


def backward_warps(p: ConvolutionProblem, target: Target, has_state: bool) -> int:
    """Returns the warps of backward programs for which a multiprocessor has registers.

    A thread has four channels; with four taps and 16-bit tokens that is 128 registers on Hopper.
    """
    taps = p.width + (has_state or p.dtype == "float32")
    if taps <= 4 and target.hopper:
        return 16
    return 12 if taps <= 6 else 8


def choose(p: ConvolutionProblem, target: Target) -> Tiles:
    """Returns the heuristic tiles."""
    width = max(16, power_of_two(p.channels))
    warps = min(4, max(1, width // LANES))
    # a segment reads width - 1 rows of the segment before: 64 rows make that 5%, from the cache.
    # Four programs per multiprocessor keep the memory busy; fewer need shorter segments
    t = Tiles(64, min(width, LANES * warps), warps)
    while t.segment > MIN_SEGMENT and (t.segment >= 2 * p.rows or t.programs(p) < 4 * target.cores):
        t = replace(t, segment=t.segment // 2)
    return t


def neighbours(p: ConvolutionProblem, target: Target, t: Tiles) -> list[Tiles]:
    """Returns tiles worth timing."""
    candidates = [replace(t, segment=n) for n in (32, 64, 128, 256)]
    candidates += [replace(t, num_warps=w, channels=LANES * w) for w in (1, 2, 4, 8)]
    candidates += [replace(t, num_warps=w, channels=2 * LANES * w) for w in (1, 2, 4)]
    return [f for f in dict.fromkeys(candidates) if f != t]
