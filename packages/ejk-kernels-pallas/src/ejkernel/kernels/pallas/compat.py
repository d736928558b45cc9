"""Differences between the versions of JAX these kernels run with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ejkernel.ops.varying import vary, varying_axes


def result(shape: tuple[int, ...], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result: inside a shard_map it varies as its operands do."""
    for x in operands:
        kind = getattr(jax.typeof(x), "manual_axis_type", None)
        if kind is not None and not kind.empty:
            return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)
    return jax.ShapeDtypeStruct(shape, dtype)


@functools.cache
def _untracked_call() -> Any:
    """A primitive that runs ``call`` on operands whose mesh axes it does not see."""
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    primitive = Primitive("untracked_call")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def results(*operands: Any, call: Callable, out_types: tuple) -> list[Any]:
        del call
        like = operands[0]

        def aval_of(x: jax.ShapeDtypeStruct) -> Any:
            spec = jax.sharding.PartitionSpec(*(None,) * len(x.shape))
            sharding = jax.sharding.NamedSharding(like.sharding.mesh, spec)
            return like.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=sharding)

        return [aval_of(x) for x in out_types]

    def lower(ctx: Any, *operands: Any, call: Callable, out_types: tuple) -> Any:
        del out_types
        seen = [x.update(manual_axis_type=type(x.manual_axis_type)()) for x in ctx.avals_in]
        return mlir.lower_fun(call, multiple_results=True)(ctx.replace(avals_in=seen), *operands)

    mlir.register_lowering(primitive, lower)
    return primitive


def untracked(
    call: Callable[..., Sequence[jax.Array]], out_types: tuple[jax.ShapeDtypeStruct, ...]
) -> Callable[..., Any]:
    """``call``, also inside a shard_map that tracks the axes over which its operands vary.

    Since JAX 0.11 Pallas refuses such operands where single warps do different work.
    """

    def call_untracked(*operands: jax.Array) -> Any:
        axes = varying_axes(*operands)
        if not axes:
            return call(*operands)
        return _untracked_call().bind(*vary(operands, axes), call=call, out_types=out_types)

    return call_untracked


@functools.cache
def mosaic_gpu_problem() -> str | None:
    """Returns why the installed JAX cannot build Mosaic GPU kernels, None when it can."""
    try:
        from jax.experimental.pallas import mosaic_gpu as plgpu
    except ImportError as error:
        return f"JAX {jax.__version__} cannot import Mosaic GPU: {error}"
    needed = ("kernel", "wgmma_accumulator_load", "LoweringSemantics", "set_max_registers")
    missing = [name for name in needed if not hasattr(plgpu, name)]
    if missing:
        return f"Mosaic GPU of JAX {jax.__version__} lacks {', '.join(missing)}; 0.10 has them"
    return None


def load_registers(ref: Any, *, layout: Any, optimized: bool) -> jax.Array:
    """Mosaic GPU's ``load`` of a full reference; before JAX 0.11 it needs an index too."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    load: Any = plgpu.load
    index = inspect.signature(load).parameters.get("idx")
    needs_index = index is not None and index.default is inspect.Parameter.empty
    return load(ref, *([()] if needs_index else []), layout=layout, optimized=optimized)


def store_registers(ref: Any, x: jax.Array) -> None:
    """``x`` to a reference in device memory, each thread its own elements; since JAX 0.12 that must
    be requested where threads together do not write whole sectors."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    store: Any = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = x
    else:
        store(ref, x, optimized=False)
