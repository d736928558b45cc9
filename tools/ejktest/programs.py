"""What a traced program makes on its way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax


def sizes_of(jaxpr: Any) -> Iterator[int]:
    """Bytes of every array that a program makes."""
    for equation in jaxpr.eqns:
        yield from (math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in equation.outvars)
        for inner in jax.tree.leaves(
            [*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from sizes_of(inner)
