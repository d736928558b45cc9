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
    """

    normalize: bool


@dataclass(frozen=True)
class Tiles(linear.Tiles):
    """Blocks of both passes."""

    def vmem(self, p: linear.Problem, backward: bool = False) -> int:
        """Bytes of vector memory of a pass: a chunk has more matrices than in linear attention."""
        return super().vmem(p, backward) + 8 * CHUNK * CHUNK * 4


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    return Problem.from_call(
        a,
        gated=a["g"] is not None,
        normalize=a["normalize_qk"],
        unsupported=linear.unsupported(a),
    )


def choose(p: Problem, chip: Chip) -> linear.Tiles:
    """Returns the blocks that linear attention has."""
    return linear.choose(p, chip, Tiles)
