"""Calls of the causal convolution: random arguments, the comparison with the oracle, what is
compiled ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejktest.abstract import abstract_call
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
    actual: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    **options: Any,
) -> None:
    """Compares output, state and gradients for ``cotangents`` with the oracle's."""
    do, dstate = cotangents(*actual[:2])
    want = convolution.causal_conv1d(**args, do=do, dstate=dstate, **options)
    check_recurrence(args, actual, want)


COMPILED = {
    "convolution": abstract_call(
        "causal_conv1d", {"batch": 2, "seq": 8192, "channels": 8192, "width": 4}, "bias",
        trained=True, options={"activation": "silu"},
    ),
    "convolution packed": abstract_call(
        "causal_conv1d",
        {"batch": 1, "seq": 65536, "channels": 8192, "width": 4, "sequences": 32, "states": 32,
         "history": 3},
        "bias", "initial_state", "cu_seqlens", trained=True, options={"activation": "silu"},
    ),
    "convolution step": abstract_call(
        "causal_conv1d",
        {"batch": 64, "seq": 1, "channels": 8192, "width": 4, "history": 3}, "initial_state",
        options={"activation": "silu", "return_state": True},
    ),
}  # fmt: skip

COMPILED_TPU = {name: COMPILED[name] for name in ("convolution", "convolution packed")}
