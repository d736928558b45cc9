"""Static properties and tiles of the short causal convolution on TPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.pallas.tpu.common.chip import Chip

DTYPES = ("bfloat16", "float32")
MIN_ROWS = 16
NEAR = 16
"""Rows before and after a block that are loaded with it: a tile of bfloat16, and more than taps."""


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of a call.

    Attributes:
        rows, channels: sizes of x ``[batch, rows, channels]``.
        width: number of taps.
        sequences: packed sequences; 0: a batch row is one sequence.
        silu: whether silu is applied to the sum.
        returns_state: whether the call returns the new states.
        dtype: dtype of x, of the output and of the new states.
        unsupported: reason against the call, or "".
    """

    batch: int
    rows: int
    channels: int
    width: int
    sequences: int
    silu: bool
    returns_state: bool
    dtype: str
    unsupported: str = ""

    @property
    def total(self) -> int:
        """Rows of all batch rows."""
        return self.batch * self.rows

    @property
    def states(self) -> int:
        """Number of states."""
        return self.sequences or self.batch


@dataclass(frozen=True)
class Tiles:
    """Rows and channels of a block of both passes; rows are a multiple of ``NEAR``."""

    rows: int
    channels: int

    def vmem(self) -> int:
        """Bytes of vector memory of the backward pass, which has about a dozen float32 blocks."""
        return 12 * (self.rows + 2 * NEAR) * self.channels * 4


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    x, cu = a["x"], a["cu_seqlens"]
    return Problem(
        *x.shape,
        width=a["weight"].shape[1],
        sequences=0 if cu is None else cu.shape[0] - 1,
        silu=a["activation"] == "silu",
        returns_state=a["return_state"],
        dtype=jnp.dtype(x.dtype).name,
        unsupported=_unsupported(a),
    )


def _unsupported(a: Mapping[str, Any]) -> str:
    """Returns the reason why no kernel here takes the call, or ""."""
    for name in ("x", "weight", "bias", "initial_state"):
        if a[name] is not None and a[name].dtype.name not in DTYPES:
            legal = " and ".join(DTYPES)
            return f"{name}: {a[name].dtype.name} is not supported, only {legal}"
    if a["x"].shape[1] < MIN_ROWS:
        return f"x: fewer than {MIN_ROWS} rows are not supported"
    return ""


def choose(p: Problem, chip: Chip) -> Tiles:
    """Returns blocks that take at least a microsecond to fetch, several times a step's overhead."""
    rows = min(256, -(-p.rows // NEAR) * NEAR)
    return Tiles(rows, p.channels if p.channels <= 512 else 512)
