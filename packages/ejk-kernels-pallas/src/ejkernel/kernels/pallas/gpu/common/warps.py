"""Parts of a warpgroup: single warps, and the thread index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.registers import (
    SCALAR,
    arith,
    asm,
    compare,
    constant,
    i32,
    splat,
    thread,
)

# for kernels that place every barrier themselves and keep reductions out of shared memory
OWN_BARRIERS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
)


def for_each_warp(body: Callable[[Any], None]) -> None:
    """Runs ``body(index)`` in every warp of this warpgroup."""
    if hasattr(plgpu, "warp_map"):
        plgpu.warp_map(body)
    else:
        pl.core_map(plgpu.WarpMesh(axis_name="warp"))(lambda: body(lax.axis_index("warp")))


def in_one_warp(index: int, body: Callable[[], None]) -> None:
    """Runs ``body`` in one warp of this warpgroup."""
    for_each_warp(lambda warp: pl.when(warp == index)(body))


def for_one_warp(body: Callable[[], None]) -> None:
    """Runs ``body`` in the first warp of this warpgroup."""
    in_one_warp(0, body)


def in_warps(*bodies: Callable[[], None]) -> None:
    """Runs each of ``bodies`` in a separate warp of this warpgroup."""

    def every(warp: Any) -> None:
        for number, body in enumerate(bodies):
            pl.when(warp == number)(body)

    for_each_warp(every)


def any_in_warp(tests: list[Any]) -> Any:
    """Returns whether either of two tests holds in any lane of this warp, as a compiler's bit."""
    text = (
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
        " selp.u32 $0, 1, 0, p; }"
    )
    vote = asm(text, "=r,r", i32(), arith.extui(i32(), arith.ori(*tests)))
    return compare("ne", vote, constant(0))


def read_thread() -> jax.Array:
    """Reads the thread index, int32, like ``thread``.

    Addresses computed from it stay where they are used. Addresses of fixed operands would be
    hoisted out of the mainloop, a register for each 16 columns.
    """
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(), return_type=kind)
    def number(_: Any) -> Any:
        return splat(thread())

    return number()
