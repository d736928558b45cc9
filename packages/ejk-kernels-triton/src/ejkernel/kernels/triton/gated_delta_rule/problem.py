"""The static properties of a call of the gated delta rule, hashable: they key programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.kernel import unsupported_operands
from ejkernel.types.problems.recurrence import RecurrentProblem

MAX_DIM = 128
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Problem(RecurrentProblem):
    """Sizes and dtypes of ``batch`` rows, and their options.

    Attributes:
        channel_gates: whether gates are given per key channel; queries and keys then have as many
            heads as values.
        normalize: whether queries and keys are divided by their lengths.
    """

    channel_gates: bool
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
    reason = unsupported_operands(dtypes, {})
    for name in ("query", "value"):
        if a[name].shape[3] > MAX_DIM:
            reason = reason or f"{name}: head dim {a[name].shape[3]} is more than {MAX_DIM}"
    channel_gates = a["g"] is not None and a["g"].ndim == 4
    problem = Problem.from_call(
        a, channel_gates=channel_gates, normalize=a["normalize_qk"], unsupported=reason or ""
    )
    return replace(problem, kv_heads=problem.heads) if channel_gates else problem
