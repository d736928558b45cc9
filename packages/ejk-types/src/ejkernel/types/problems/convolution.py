"""Static properties of the short causal convolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax.numpy as jnp


@dataclass(frozen=True)
class ConvolutionProblem:
    """Sizes, dtypes and options of ``batch`` rows.

    Attributes:
        rows, channels: sizes of x ``[batch, rows, channels]``.
        width: number of taps.
        sequences: packed sequences per batch row; 0: a batch row is one sequence.
        silu: whether silu is applied to the sum.
        returns_state: whether the call returns the new states.
        dtype: dtype of x, of the output and of the new states.
        unsupported: a backend's reason against the dtypes or sizes of the call, or "".
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

    @classmethod
    def from_call(cls, a: Mapping[str, Any], unsupported: str = "") -> Self:
        """Returns the problem of a call whose arguments are canonical."""
        x, cu = a["x"], a["cu_seqlens"]
        return cls(
            *x.shape,
            width=a["weight"].shape[1],
            sequences=0 if cu is None else cu.shape[0] - 1,
            silu=a["activation"] == "silu",
            returns_state=a["return_state"],
            dtype=jnp.dtype(x.dtype).name,
            unsupported=unsupported,
        )

    @property
    def total(self) -> int:
        """Rows of all batch rows."""
        return self.batch * self.rows

    @property
    def states(self) -> int:
        """Number of states."""
        return self.batch * max(self.sequences, 1)

    def folded(self, size: int) -> Self:
        """Returns the problem of ``size`` times as many batch rows."""
        return replace(self, batch=size * self.batch)


def float_dtypes(a: Mapping[str, Any]) -> dict[str, str]:
    """Returns the dtypes of the float arrays of a call, by name."""
    arrays = {name: a[name] for name in ("x", "weight", "bias", "initial_state")}
    return {name: jnp.dtype(x.dtype).name for name, x in arrays.items() if x is not None}
