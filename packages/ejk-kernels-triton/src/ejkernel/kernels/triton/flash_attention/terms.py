"""Arithmetic that the kernels leave to their callers: per call, and per row in XLA.

Kernels compute s with logits x = slope * s + shift in base 2, and gradients of logits without a
constant factor; both are applied to accumulators, where they cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.types.attention.problem import LOG2E, Problem


def logit_shift(problem: Problem) -> float:
    """Returns the shift in base 2: x = cap * (1 + 2 w) with a soft cap; the kernels compute w."""
    return (problem.soft_cap or 0.0) * LOG2E


def logit_unit(problem: Problem) -> float:
    """Returns the slope of natural logits over the s of the kernels, never negative."""
    if problem.soft_cap is not None:
        return 2.0 * problem.soft_cap
    return 1.0 if problem.in_natural_units else abs(problem.scale)


def natural_logarithm(x: float) -> float:
    """Returns a logarithm in base 2 as a natural one."""
    return x / LOG2E


def gradient_factor(problem: Problem) -> float:
    """Returns the factor of the logits' gradient: dropout scale times the soft cap's constant."""
    return problem.keep_scale * (1.0 if problem.soft_cap is None else -4.0)


def row_terms(
    problem: Problem, do: jax.Array, delta: jax.Array, base_tail: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns do ``[b, q, h, dv]`` and delta ``[b, h, q]`` as the backward kernels read them.

    The kernels compute p without a factor of exp2(-base_tail), which is 1 unless a bias made logits
    large. All gradients are linear in do and delta, so the factor is applied to these. delta is
    divided by the dropout scale.
    """
    delta = delta / problem.keep_scale
    if base_tail is not None:
        share = jnp.exp2(-base_tail)
        delta = delta * share
        scaled = do.astype(share.dtype) * jnp.swapaxes(share, 1, 2)[..., None]
        do = scaled.astype(do.dtype)
    return {"do": do, "delta": delta}
