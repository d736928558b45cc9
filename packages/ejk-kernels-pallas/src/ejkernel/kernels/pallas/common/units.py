"""In what the kernels count logits: products, or tangents of capped ones.

A logit is ``unit(problem)`` times the number that a kernel holds, whose sign is that of the scale.
The largest number of a row, and lse in the same numbers, are exact however large the logits are:
differences from them are taken before anything is rounded by a factor.
"""

from __future__ import annotations

from ejkernel.types.attention.problem import Problem
from ejkernel.types.serving.problem import PagedProblem

LARGE = 2.0**16  # logits from here on: a sum that starts from lse rounds by more than a percent


def scale(problem: Problem | PagedProblem) -> float:
    """Factor of the products: a tiny one for 0, which keeps -inf of hidden keys what it is."""
    return problem.scale or 2.0**-120


def sign(problem: Problem | PagedProblem) -> float:
    """Of the scale; capped logits have theirs already."""
    return -1.0 if problem.soft_cap is None and problem.scale < 0.0 else 1.0


def unit(problem: Problem | PagedProblem) -> float:
    """What one is worth, in natural logits; positive."""
    return abs(scale(problem)) if problem.soft_cap is None else problem.soft_cap
