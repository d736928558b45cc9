"""The static properties of a call of causal_conv1d, hashable: they key programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.kernel import unsupported


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of ``batch`` rows.

    Attributes:
        rows, channels: sizes of x ``[batch, rows, channels]``.
        width: number of taps.
        sequences: packed sequences per batch row; 0: a batch row is one sequence.
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
    def states(self) -> int:
        """Number of states."""
        return self.batch * max(self.sequences, 1)

    def folded(self, size: int) -> Problem:
        """Returns the problem of ``size`` times as many batch rows."""
        return replace(self, batch=size * self.batch)


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    x, cu = a["x"], a["cu_seqlens"]
    floats = {name: a[name] for name in ("x", "weight", "bias", "initial_state")}
    dtypes = {name: jnp.dtype(y.dtype).name for name, y in floats.items() if y is not None}
    return Problem(
        *x.shape,
        width=a["weight"].shape[1],
        sequences=0 if cu is None else cu.shape[0] - 1,
        silu=a["activation"] == "silu",
        returns_state=a["return_state"],
        dtype=dtypes["x"],
        unsupported=unsupported(dtypes, {}) or "",
    )
