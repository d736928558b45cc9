"""What of the arithmetic the kernels leave to their callers: per call, and per row for XLA.

Kernels hold logits as s with x = slope * s + shift in base 2, and gradients of logits less a
factor; both end up in sums, where they cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.types.problem import LOG2E, Problem


def logit_shift(problem: Problem) -> float:
    """With a soft cap x = cap * (1 + 2 w), and the kernels hold w."""
    return (problem.soft_cap or 0.0) * LOG2E


def gradient_factor(problem: Problem) -> float:
    """Of the gradient of the logits: of what dropout keeps, and of the slope of a soft cap."""
    return problem.keep_scale * (1.0 if problem.soft_cap is None else -4.0)


def row_terms(problem: Problem, lse: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the backward kernels read of each row, from lse and delta ``[b, h, q]``, float32.

    lse in base 2, less the shift of the logits, +inf for rows that see nothing: there p = 0;
    delta less the factor of what dropout keeps.
    """
    base = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E - logit_shift(problem))
    return base, delta / problem.keep_scale
