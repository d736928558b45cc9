"""The static properties of a call of the gated delta rule, hashable: they key programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.kernel import unsupported
from ejkernel.types.problems.recurrence import RecurrentProblem

MAX_DIM = 128


@dataclass(frozen=True)
class Problem(RecurrentProblem):
    """Sizes and dtypes of ``batch`` rows, and their options.

    Attributes:
        normalize: whether queries and keys are divided by their lengths.
    """

    normalize: bool

    @property
    def precision(self) -> str:
        """Precision of float32 matmuls on NVIDIA GPUs.

        A float32 key rounded to TF32 has another length: with beta 2 the state would grow.
        """
        return "tf32" if self.dtype == "float16" else "tf32x3"


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    names = ("query", "key", "value", "g", "beta", "initial_state")
    dtypes = {name: jnp.dtype(a[name].dtype).name for name in names if a[name] is not None}
    reason = unsupported(dtypes, {})
    for name in ("query", "value"):
        if a[name].shape[3] > MAX_DIM:
            reason = reason or f"{name}: head dim {a[name].shape[3]} is more than {MAX_DIM}"
    if a["g"] is not None and a["g"].ndim == 4:
        reason = reason or "g: a log decay per key channel is not supported"
    return Problem.from_call(a, normalize=a["normalize_qk"], unsupported=reason or "")
