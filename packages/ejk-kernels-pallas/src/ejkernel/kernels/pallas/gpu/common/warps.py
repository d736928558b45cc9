"""Parts of a warpgroup: single warps, and the thread's own number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import SCALAR, thread


def for_each_warp(body: Callable[[Any], None]) -> None:
    """Runs ``body(number)`` in every warp of this warpgroup."""
    if hasattr(plgpu, "warp_map"):
        plgpu.warp_map(body)
    else:
        pl.core_map(plgpu.WarpMesh(axis_name="warp"))(lambda: body(lax.axis_index("warp")))


def for_one_warp(body: Callable[[], None]) -> None:
    """Runs ``body`` in the first warp of this warpgroup."""
    for_each_warp(lambda warp: pl.when(warp == 0)(body))


def thread_anew() -> jax.Array:
    """The thread's number, int32, as ``thread`` reads it.

    Addresses made from it stay where they are used. Those of fixed operands would be computed
    before the walk, a register for each 16 columns.
    """
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(), return_type=kind)
    def number(_: Any) -> Any:
        return mgpu.FragmentedArray.splat(thread(), (), is_signed=True)

    return number()
