"""Intermediate results of a traced program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a program, those inside others included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from equations_of(inner)


def sizes_of(jaxpr: Any) -> Iterator[int]:
    """Bytes of every array that a program makes."""
    for equation in equations_of(jaxpr):
        for aval in (v.aval for v in equation.outvars):  # semaphores have no bytes
            yield math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
