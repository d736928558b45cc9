"""One primitive that the compiler partitions by a sharding rule of ours.

A compiler that partitions a program knows nothing about a kernel and gathers its operands on every
device. Here it asks the region (``ejkernel.ops.region``) how each device runs it. On one device, on
TPUs, inside a ``shard_map`` over the full mesh and in exported programs the region is inlined, and
nothing of it remains.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ejkernel.ops import compat
from ejkernel.ops.config.versions import versions_text
from ejkernel.ops.interpret import interpreting
from ejkernel.ops.region import Function, Region, Words, inside_region
from ejkernel.ops.utils.device import device_kind


def regions_are_partitioned() -> bool:
    """Returns whether the compiler of the device asks regions how to run on each device."""
    # an interpreted kernel calls back to the host, which JAX cannot do in a partitioned part
    return not interpreting() and device_kind() != "tpu"  # libtpu has no custom partitioning


def may_be_sharded(arrays: Any) -> bool:
    """Returns whether the compiler may find one of the arrays sharded, as their types say."""
    # an interpreted kernel calls back to the host, which JAX cannot do in a partitioned part
    if inside_region() or interpreting():
        return False
    leaves = jax.tree.leaves(arrays)
    if not any(isinstance(x, compat.Tracer) for x in leaves):
        return False
    return automatic_devices(leaves) > 1


def automatic_devices(leaves: Iterable[Any]) -> int:
    """Returns over how many devices the compiler may shard arrays, as their types say.

    1 where types have no mesh, or say themselves how arrays are sharded.
    """
    meshes = (*map(compat.mesh_of, leaves), *compat.ambient_mesh())
    mesh = next((mesh for mesh in meshes if mesh is not None and not mesh.empty), None)
    if mesh is None:
        return 1
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if jax.sharding.AxisType.Explicit in kinds.values():
        return 1
    auto = (mesh.shape[n] for n, kind in kinds.items() if kind == jax.sharding.AxisType.Auto)
    return math.prod(auto)


def run_region(
    function: Function,
    arrays: Sequence[Any],
    operands: Sequence[Words],
    results: Callable[[Sequence[Any]], Sequence[Words]],
    rule: Any,
    *,
    summed: bool = False,
) -> tuple[Any, ...]:
    """Runs ``function(None, *arrays)`` as one region.

    ``operands``: the words of the arrays' axes; ``results``: returns the words of the results'
    axes from their types. The other arguments are attributes of ``Region``.
    """
    region = Region(function, rule, tuple(operands), (), summed)
    return tuple(_bind(region, arrays, results))


def _bind(region: Region, arrays: Sequence[Any], results: Any = None) -> list[Any]:
    jaxpr = jax.make_jaxpr(partial(region.traced, None))(*arrays)
    if results is not None:
        region = replace(region, results=tuple(results(jaxpr.out_avals)))
    return _region.bind(*arrays, region=region, body=_Body(jaxpr))


@dataclass(frozen=True, eq=False)
class _Body:
    """The trace of a region's function on the unsharded arrays.

    JAX does not look into it: primitives that it would have to replace there, such as names for
    ``jax.checkpoint``, are replaced where the region is lowered.
    """

    jaxpr: Any

    def __call__(self, *arrays: Any) -> list[Any]:
        return jaxpr_as_fun(self.jaxpr)(*arrays)

    def __repr__(self) -> str:
        return str(self.jaxpr)


_region = Primitive("ejkernel_region")
_region.multiple_results = True
compat.needs_devices(_region)


@_region.def_impl
def _run_inline(*arrays: Any, region: Region, body: _Body) -> list[Any]:
    return body(*arrays)


@_region.def_abstract_eval
def _abstract(*avals: Any, region: Region, body: _Body) -> list[Any]:
    meshes = (aval.sharding.mesh for aval in avals)
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    return [compat.on_mesh(aval, mesh) for aval in body.jaxpr.out_avals]


def _batch(arrays: Any, dims: Any, *, region: Region, body: _Body) -> Any:
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    results = _bind(region.mapped(dims, size), arrays)
    return results, [0] * len(results)


batching.primitive_batchers[_region] = _batch


def _jvp(primals: Any, tangents: Any, *, region: Region, body: _Body) -> Any:
    """The first gradient is the business of the kernel's ``custom_vjp``, the others are JAX's."""
    results = _region.bind(*primals, region=region, body=body)
    smooth = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]
    floats = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
    pushed = _bind(
        region.pushed_forward(smooth, floats), [*primals, *(tangents[i] for i in smooth)]
    )
    of_results = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    for i, tangent in zip(floats, pushed, strict=True):
        of_results[i] = tangent
    return results, of_results


ad.primitive_jvps[_region] = _jvp


def _transpose(cotangents: Any, *arrays: Any, region: Region, body: _Body) -> Any:
    linear = [i for i, x in enumerate(arrays) if ad.is_undefined_primal(x)]
    others = [x for x in arrays if not ad.is_undefined_primal(x)]
    filled = map(ad.instantiate_zeros, cotangents)
    zeros = [jnp.zeros(arrays[i].aval.shape, arrays[i].aval.dtype) for i in linear]
    results = _bind(region.pulled_back(linear), [*others, *filled, *zeros])
    gradients = dict(zip(linear, results, strict=True))
    return [gradients.get(i) for i in range(len(arrays))]


ad.primitive_transposes[_region] = _transpose


def _lower(context: Any, *operands: Any, region: Region, body: _Body) -> Any:
    if not compat.is_partitioned(context):
        return mlir.lower_fun(body, multiple_results=True)(context, *operands)

    def partitioned(*arrays: Any) -> tuple[Any, ...]:
        # JAX reads types off it, no more: where it would run it, the region is inlined
        return tuple(jnp.zeros(aval.shape, aval.dtype) for aval in body.jaxpr.out_avals)

    context, full = compat.over_automatic_axes(context)
    custom = custom_partitioning(partitioned)
    custom.def_partition(
        partial(region.partition, full),
        decode_shardings=False,  # JAX cannot decode an axis that is split over part of a mesh axis
        infer_sharding_from_operands=region.infer_result_shardings,
        sharding_rule=region.shardy_rule,
    )

    def run_custom(*arrays: Any) -> tuple[Any, ...]:
        return custom(*arrays)

    run_custom.__name__ = f"ejkernel_region_{_unique_name(region, body)}"
    return mlir.lower_fun(jax.jit(run_custom), multiple_results=True)(context, *operands)


mlir.register_lowering(_region, _lower)


_count = itertools.count()
_process = uuid.uuid4().hex


def _unique_name(region: Region, body: _Body) -> str:
    """Returns a name that no region has which does something else.

    JAX finds compiled programs on disk by their texts, where the address of a region stands for
    what it does. Another region may have that address later, and programs that JAX finds again in
    another process have no addresses in their texts.
    """
    if not compat.finds_partitioned_programs():
        return f"{_process}_{next(_count)}"
    digest = hashlib.sha256(f"{versions_text()} {body} {region}".encode())
    for constant in body.jaxpr.consts:
        digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()
