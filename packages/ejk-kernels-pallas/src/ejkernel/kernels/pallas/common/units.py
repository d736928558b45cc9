"""Units of logits in the kernels: raw dot products, or tanh of capped ones.

A logit is ``unit(problem)`` times the value in a kernel, whose sign is that of the scale.
The largest value of a row, and lse in the same unit, are exact however large the logits are:
differences from them are taken before anything is rounded by a factor.
"""

from __future__ import annotations

from ejkernel.types.attention.problem import Problem
from ejkernel.types.serving.problem import PagedProblem

LARGE = 2.0**16  # at such logits an accumulator that starts from lse rounds by more than a percent


def scale(problem: Problem | PagedProblem) -> float:
    """Returns the factor of the dot products: tiny for 0, so that hidden keys stay at -inf."""
    return problem.scale or 2.0**-120


def sign(problem: Problem | PagedProblem) -> float:
    """Returns the sign of the scale; capped logits have it already."""
    return -1.0 if problem.soft_cap is None and problem.scale < 0.0 else 1.0


def unit(problem: Problem | PagedProblem) -> float:
    """Returns the natural logit of a value of 1; positive."""
    return abs(scale(problem)) if problem.soft_cap is None else problem.soft_cap
