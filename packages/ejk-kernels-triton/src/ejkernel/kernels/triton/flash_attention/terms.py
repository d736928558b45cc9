"""What of the arithmetic the kernels leave to their callers: per call, and per row for XLA.

Kernels hold logits as s with x = slope * s + shift in base 2, and gradients of logits less a
factor; both end up in sums, where they cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.types.attention.problem import LOG2E, Problem


def logit_shift(problem: Problem) -> float:
    """With a soft cap x = cap * (1 + 2 w), and the kernels hold w."""
    return (problem.soft_cap or 0.0) * LOG2E


def logit_unit(problem: Problem) -> float:
    """Of what the kernels hold, in natural logits: their slope without the base, never negative."""
    if problem.soft_cap is not None:
        return 2.0 * problem.soft_cap
    return 1.0 if problem.biased else abs(problem.scale)


def natural_logarithm(x: float) -> float:
    """Returns a logarithm in base 2 as a natural one."""
    return x / LOG2E


def gradient_factor(problem: Problem) -> float:
    """Of the gradient of the logits: of what dropout keeps, and of the slope of a soft cap."""
    return problem.keep_scale * (1.0 if problem.soft_cap is None else -4.0)


def row_terms(
    problem: Problem, do: jax.Array, delta: jax.Array, rest: jax.Array | None
) -> dict[str, jax.Array]:
    """What the backward kernels read of do ``[b, q, h, dv]`` and of delta ``[b, h, q]``.

    They compute p up to a factor of exp2(-rest), which is 1 unless a bias made logits large. All
    gradients are linear in do and delta, so these take it. delta is less the factor of what
    dropout keeps.
    """
    delta = delta / problem.keep_scale
    if rest is not None:
        share = jnp.exp2(-rest)
        delta = delta * share
        scaled = do.astype(share.dtype) * jnp.swapaxes(share, 1, 2)[..., None]
        do = scaled.astype(do.dtype)
    return {"do": do, "delta": delta}
