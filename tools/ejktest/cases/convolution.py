"""Calls of the causal convolution: random arguments, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejktest.cases.linear import check_recurrence, cotangents
from ejktest.drawn import array, normal
from ejktest.oracles import convolution


def convolution_arguments(
    *, b: int, s: int, c: int, width: int, states: int | None = None, dtype: Any = np.float32
) -> dict[str, jax.Array]:
    """Returns normally distributed arguments by name."""
    shapes = {
        "x": (b, s, c),
        "weight": (c, width),
        "bias": (c,),
        "initial_state": (states or b, c, width - 1),
    }
    drawn = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return {name: array(x, dtype) for name, x in drawn.items()}


def check_convolution(
    args: Mapping[str, jax.Array],
    found: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    **options: Any,
) -> None:
    """Compares output, state and gradients for ``cotangents`` with the oracle's."""
    do, dstate = cotangents(*found[:2])
    want = convolution.causal_conv1d(**args, do=do, dstate=dstate, **options)
    check_recurrence(args, found, want)
