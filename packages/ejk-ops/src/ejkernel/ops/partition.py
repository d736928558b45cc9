"""One primitive that the compiler partitions by a sharding rule of ours.

A compiler that partitions a program knows nothing about a kernel and gathers its operands on every
device. Here a *region* of a program, one pass of a kernel, says the words of the axes of its
operands and results. A rule (``ShardingRule`` of ejk-types, or anything with its methods) turns
them into a Shardy rule, by which shardings propagate through the region, and into the layout in
which each device runs the region on its part. On one device, on TPUs, inside a ``shard_map`` over
the full mesh and in exported programs the region is inlined, and nothing of it remains.
"""

from __future__ import annotations

import contextvars
import hashlib
import itertools
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from ejkernel.ops import compat
from ejkernel.ops.config.versions import versions_text
from ejkernel.ops.interpret import interpreting
from ejkernel.ops.utils.device import device_kind

Words = tuple[str, ...]
MeshAxes = tuple[str, ...]
Function = Callable[..., tuple[Any, ...]]
Arrays = Iterable[tuple[Words, Any]]
"""Arrays with the words of their axes."""

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("ejkernel_region", default=False)


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a program that runs on every device on its part of the arrays.

    Attributes:
        function: ``(shard, *operands) -> results``; shard is None for the unsharded arrays, else
            what the rule's ``shard`` gives, and the operands are the device's.
        rule: how arrays may be sharded.
        operands, results: the words of the axes of each array.
        summed: whether the devices' results are summed over all mesh axes that the words of a
            result do not have; otherwise over those that the layout names in ``summed_axes``,
            and over the others results are alike.
        context: in which ``function`` is traced for the devices, while the program is compiled.
        settings: JAX's settings for that trace, which takes place in another thread.
    """

    function: Function = field(repr=False)
    rule: Any
    operands: tuple[Words, ...]
    results: tuple[Words, ...]
    summed: bool = False
    context: contextvars.Context = field(default_factory=contextvars.copy_context, repr=False)
    settings: Callable[[], Any] = field(default_factory=compat.trace_settings, repr=False)

    def mapped(self, dims: Sequence[int | None], size: int) -> Region:
        """Returns the region under ``vmap``, results mapped along their first axis."""
        taken = {w for words in self.operands for w in words if w.startswith("mapped_")}
        word = next(w for w in (f"mapped_{i}" for i in itertools.count()) if w not in taken)
        function = self.function

        def map_function(shard: Any, *arrays: Any) -> tuple[Any, ...]:
            return jax.vmap(partial(function, shard), in_axes=tuple(dims))(*arrays)

        operands = tuple(
            words if d is None else (*words[:d], word, *words[d:])
            for words, d in zip(self.operands, dims, strict=True)
        )
        rule = replace(self.rule, sizes={**self.rule.sizes, word: size})
        results = tuple((word if size > 1 else "", *words) for words in self.results)
        return replace(self, function=map_function, rule=rule, operands=operands, results=results)

    def pushed_forward(self, smooth: Sequence[int], results: Sequence[int]) -> Region:
        """Returns the region of the tangents of some results, from tangents of some operands.

        The operands of this region come first, then the tangents.
        """
        function, count = self.function, len(self.operands)

        def push_forward(shard: Any, *arrays: Any) -> tuple[Any, ...]:
            primals = arrays[:count]

            def call(*floats: Any) -> tuple[Any, ...]:
                changed = list(primals)
                for i, x in zip(smooth, floats, strict=True):
                    changed[i] = x
                values = function(shard, *changed)
                return tuple(values[i] for i in results)

            return jax.jvp(call, tuple(primals[i] for i in smooth), tuple(arrays[count:]))[1]

        operands = (*self.operands, *(self.operands[i] for i in smooth))
        words = tuple(self.results[i] for i in results)
        return replace(self, function=push_forward, operands=operands, results=words)

    def pulled_back(self, linear: Sequence[int]) -> Region:
        """Returns the region that pulls cotangents back to operands in which this one is linear.

        Its operands are the others, the cotangents of all results, and zeros for the linear ones.
        """
        function, count, ends = self.function, len(self.operands), self.results
        others = [i for i in range(count) if i not in linear]

        def pull_back(shard: Any, *arrays: Any) -> tuple[Any, ...]:
            fixed = dict(zip(others, arrays, strict=False))
            cotangents = arrays[len(others) : len(others) + len(ends)]
            if shard is not None and not self.summed:
                counted = zip(cotangents, ends, strict=True)
                cotangents = tuple(_counted_once(shard, x, words) for x, words in counted)

            def call(*floats: Any) -> tuple[Any, ...]:
                operands = fixed | dict(zip(linear, floats, strict=True))
                return tuple(function(shard, *(operands[i] for i in range(count))))

            # a vjp would differentiate first, and JAX differentiates no tangents of a custom_vjp
            pull = jax.linear_transpose(call, *arrays[len(others) + len(ends) :])
            return pull(tuple(cotangents))

        words = tuple(self.operands[i] for i in linear)
        operands = (*(self.operands[i] for i in others), *ends, *words)
        return replace(self, function=pull_back, operands=operands, results=words, summed=True)

    # ---- the compiler's questions -----------------------------------------------------------

    def shardy_rule(self, mesh: Any, operand_types: Any, result_types: Any) -> SdyShardingRule:
        """Returns which axes are sharded alike."""
        mesh_sizes, names = dict(mesh.shape), itertools.count()
        sizes: dict[str, int] = {}  # of factors that share an axis
        alone: set[str] = set()  # factors that have an axis for themselves somewhere

        def mapping(words: Words, kind: Any) -> ArrayMapping:
            axes: list[Any] = []
            for factors in self.rule.factors(words, kind.shape, mesh_sizes):
                named = {name or f"own_{next(names)}": size for name, size in factors or [("", 1)]}
                if len(named) == 1:
                    axes += named
                    alone.update(named)
                else:
                    axes.append(CompoundFactor(*named))
                    sizes.update(named)
            return ArrayMapping(*axes)

        operands = tuple(map(mapping, self.operands, operand_types))
        results = tuple(map(mapping, self.results, result_types))
        # JAX takes the size of a factor from its axis where it has one
        unsized: dict[str, Any] = {n: size for n, size in sizes.items() if n not in alone}
        return SdyShardingRule(operands, results, **unsized)

    def partition(self, full: Any, mesh: Any, operands: Any, results: Any) -> Any:
        """Returns the full mesh, the function of one device, and how results and operands lie.

        ``full``: the mesh of the program, which inside a ``shard_map`` over some of its axes has
        more axes than ``mesh``, over which the compiler shards; None: they are the same.
        """
        of_operands = list(zip(self.operands, operands, strict=True))
        of_results = list(zip(self.results, results, strict=True))
        try:
            layout = self._layout(mesh, of_operands + of_results)
        except ValueError as error:
            _refusals.append(error)
            raise
        run = partial(self.context.copy().run, self.on_device, layout)
        return (
            full or mesh,
            run,
            _shardings(layout, mesh, of_results),
            _shardings(layout, mesh, of_operands),
        )

    def infer_result_shardings(self, mesh: Any, operands: Any, results: Any) -> Any:
        """Returns how results lie where the compiler propagates shardings without Shardy."""
        layout = self._layout(mesh, zip(self.operands, operands, strict=True))
        return _shardings(layout, mesh, zip(self.results, results, strict=True))

    def _layout(self, mesh: Any, arrays: Arrays) -> Any:
        sizes = dict(mesh.shape)
        split = [(words, mesh_axes_of(sizes, compat.device_tiles(x))) for words, x in arrays]
        return self.rule.layout(sizes, split)

    def on_device(self, layout: Any, *arrays: Any) -> tuple[Any, ...]:
        """Runs the function on the part of one device."""
        shard = self.rule.shard(layout) if layout.spread else None
        with self.settings():
            return self._summed(layout, self.traced(shard, *arrays))

    def _summed(self, layout: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
        used = set(layout.summed_axes)
        if self.summed:
            used.update(axis for axes in layout.spread.values() for axis in axes)
        sums = []
        for x, words in zip(results, self.results, strict=True):
            missing = used.difference(*map(layout.axes, words))
            sums.append(jax.lax.psum(x, tuple(sorted(missing))) if missing else x)
        return tuple(sums)

    def traced(self, shard: Any, *arrays: Any) -> tuple[Any, ...]:
        """Runs the function; no region is made inside it."""
        token = _inside.set(True)
        try:
            return self.function(shard, *arrays)
        finally:
            _inside.reset(token)


def _counted_once(shard: Any, x: jax.Array, words: Words) -> jax.Array:
    """Returns zeros in place of a cotangent that another device of the layout has as well.

    A sum of the devices' results is not such: its cotangent belongs to each of them.
    """
    layout = shard.layout
    used = {axis for axes in layout.spread.values() for axis in axes}
    for axis in sorted(used.difference(layout.summed_axes, *map(layout.axes, words))):
        x = jnp.where(jax.lax.axis_index(axis) == 0, x, 0)
    return x


def _shardings(layout: Any, mesh: Any, arrays: Arrays) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, layout.spec(words, x.shape)) for words, x in arrays)


_refusals: list[ValueError] = []


def take_refusal() -> ValueError | None:
    """Returns the error that ended a compilation, once; JAX raises another that holds its text."""
    error = _refusals[-1] if _refusals else None
    _refusals.clear()
    return error


def mesh_axes_of(mesh_sizes: Mapping[str, int], tiles: np.ndarray) -> list[MeshAxes]:
    """Returns the mesh axes over which each axis of an array is split, () for an unsplit axis.

    An axis that is split over a part of a mesh axis counts as unsplit. ``tiles``: the indices of
    the devices that have each tile of the array, with an axis for each axis of the array and one
    more for the devices of a tile. Devices are numbered along the mesh.
    """
    coordinates = dict(zip(mesh_sizes, np.indices(tuple(mesh_sizes.values())), strict=True))
    split: list[MeshAxes] = []
    for axis in range(tiles.ndim - 1):
        count = tiles.shape[axis]
        of_device = np.empty(tiles.size, int)
        of_device[tiles.ravel()] = np.indices(tiles.shape)[axis].ravel()
        split.append(_splitting(coordinates, of_device, count) if count > 1 else ())
    return split


def _splitting(
    coordinates: Mapping[str, np.ndarray], of_device: np.ndarray, count: int
) -> MeshAxes:
    """Returns the mesh axes, major first, along which each device's tile is counted."""
    for length in range(1, len(coordinates) + 1):
        for axes in itertools.permutations(coordinates, length):
            index = np.zeros_like(coordinates[axes[0]])
            for axis in axes:
                index = index * (coordinates[axis].max() + 1) + coordinates[axis]
            if index.max() + 1 == count and (index.ravel() == of_device).all():
                return axes
    return ()


# ---- where a region is made ---------------------------------------------------------------------


def inside_region() -> bool:
    """Returns whether what is being traced belongs to a region."""
    return _inside.get()


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
