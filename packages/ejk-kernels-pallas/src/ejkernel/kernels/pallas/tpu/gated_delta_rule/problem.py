"""Static properties and tiles of the gated delta rule on TPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.linear_attention import problem as linear
from ejkernel.kernels.pallas.tpu.linear_attention.problem import CHUNK


@dataclass(frozen=True)
class Problem(linear.Problem):
    """Static properties of a call; ``heads`` of values, ``kv_heads`` of queries and keys.

    Attributes:
        normalize: whether queries and keys are divided by their lengths.
        channels: whether every key channel decays by itself.
    """

    normalize: bool
    channels: bool = False


@dataclass(frozen=True)
class Tiles(linear.Tiles):
    """Blocks of both passes."""

    def vmem(self, p: linear.Problem, backward: bool = False) -> int:
        """Bytes of vector memory of a pass: a chunk has more matrices than in linear attention."""
        channels = isinstance(p, Problem) and p.channels
        if backward and channels:
            return self._vmem_of_channel_gradients(p)
        gates = 2 * self.rows * p.padded_dims[0] * 4 if channels else 0
        states = (2 * self.chunks + p.group) * p.dim * p.value_dim * 4 if backward else 0
        states += self._of_group(p) if backward else 0
        return super().vmem(p, backward) + gates + states + 8 * CHUNK * CHUNK * 4

    def _of_group(self, p: linear.Problem) -> int:
        """Bytes that the backward pass holds for the heads that share a key, over one head."""
        dim, value_dim = p.padded_dims
        outputs = 2 * self.rows * value_dim * p.itemsize + 4 * 4 * dim * value_dim
        sums = 2 * self.rows * dim * 4 if p.group > 1 else 0
        return (p.group - 1) * outputs + sums

    def _vmem_of_channel_gradients(self, p: linear.Problem) -> int:
        dim, value_dim = p.padded_dims
        buffers = 2 * self.rows * (6 * dim + 4 * value_dim) * 4
        states = (2 * self.chunks + p.group) * dim * value_dim * 4 + self._of_group(p)
        states += 2 * (p.group - 1) * self.rows * dim * 4
        # the compiler keeps the values of all chunks: found by compiling dims of 128 and 256
        values = self.rows * 4 * 9 * p.itemsize * (max(dim, value_dim) + 170)
        return buffers + states + values


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    gate = a["g"]
    return Problem.from_call(
        a,
        gated=gate is not None,
        normalize=a["normalize_qk"],
        channels=gate is not None and gate.ndim == 4,
        unsupported=linear.unsupported(a, channels=True),
    )


def choose(p: Problem, chip: Chip) -> linear.Tiles:
    """Returns the blocks that linear attention has.

    Chunks of channel gates are long code: two of them gain 3% less than four and compile in half
    the time.
    """
    return linear.choose(p, chip, Tiles, most=2 if p.channels else linear.MAX_CHUNKS)
