"""One primitive that the compiler partitions by a sharding rule of ours.

A compiler that partitions a program knows nothing about a kernel and gathers its operands on every
device. Here a *region* of a program, one pass of a kernel, says the words of the axes of its
operands and results. A rule (``ShardingRule`` of ejk-types, or anything with its methods) turns
them into a Shardy rule, by which shardings propagate through the region, and into the layout in
which each device runs the region on its part. On one device, inside a ``shard_map`` over the whole
mesh and in exported programs the region is inlined, and nothing of it remains.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding

from ejkernel.ops import compat
from ejkernel.ops.interpret import interpreting

Words = tuple[str, ...]
Function = Callable[..., tuple[Any, ...]]

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("ejkernel_region", default=False)


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a program that runs on every device on its part of the arrays.

    Attributes:
        function: ``(shard, *operands) -> results``; shard is None for the unsharded arrays, else
            what the rule's ``shard`` gives, and the operands are the device's.
        rule: how arrays may be sharded.
        operands, results: the words of the axes of each array.
        summed: whether the devices' results are summed over mesh axes that the words of a result
            do not have; otherwise those results are alike.
        context: in which ``function`` is traced for the devices, while the program is compiled.
    """

    function: Function
    rule: Any
    operands: tuple[Words, ...]
    results: tuple[Words, ...]
    summed: bool = False
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def mapped(self, dims: Sequence[int | None], size: int) -> Region:
        """Returns the region under ``vmap``, results mapped along their first axis."""
        taken = {w for words in self.operands for w in words if w.startswith("mapped_")}
        word = next(w for w in (f"mapped_{i}" for i in itertools.count()) if w not in taken)
        function = self.function

        def run(shard: Any, *arrays: Any) -> tuple[Any, ...]:
            return jax.vmap(partial(function, shard), in_axes=tuple(dims))(*arrays)

        operands = tuple(
            words if d is None else (*words[:d], word, *words[d:])
            for words, d in zip(self.operands, dims, strict=True)
        )
        rule = replace(self.rule, sizes={**self.rule.sizes, word: size})
        results = tuple((word if size > 1 else "", *words) for words in self.results)
        return replace(self, function=run, rule=rule, operands=operands, results=results)

    # ---- the compiler's questions -----------------------------------------------------------

    def shardy_rule(self, mesh: Any, operand_types: Any, result_types: Any) -> SdyShardingRule:
        """Returns which axes are sharded alike."""
        sizes = {} if mesh.empty else dict(mesh.shape)
        names, factor_sizes = itertools.count(), {}

        def mapping(words: Words, kind: Any) -> ArrayMapping:
            axes: list[Any] = []
            for factors in self.rule.factors(words, kind.shape, sizes):
                named = [(name or f"own_{next(names)}", size) for name, size in factors]
                named = named or [(f"own_{next(names)}", 0)]
                if len(named) == 1:
                    axes.append(named[0][0])
                    alone.add(named[0][0])
                else:
                    factor_sizes.update(named)
                    axes.append(CompoundFactor(*(name for name, _ in named)))
            return ArrayMapping(*axes)

        alone: set[str] = set()
        operands = tuple(map(mapping, self.operands, operand_types))
        results = tuple(map(mapping, self.results, result_types))
        for name in alone:  # its size is that of the axis
            factor_sizes.pop(name, None)
        return SdyShardingRule(operands, results, **factor_sizes)

    def partition(self, mesh: Any, operands: Any, results: Any) -> Any:
        """Returns the mesh, the function of one device, and how results and operands lie."""
        layout = self._layout(mesh, [*zip(self.operands, operands), *zip(self.results, results)])

        def shardings(words: Sequence[Words], arrays: Any) -> tuple[Any, ...]:
            specs = (layout.spec(w, x.shape) for w, x in zip(words, arrays, strict=True))
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        run = partial(self.context.copy().run, self._on_device, layout)
        return mesh, run, shardings(self.results, results), shardings(self.operands, operands)

    def infer_result_shardings(self, mesh: Any, operands: Any, results: Any) -> Any:
        """Returns how results lie where the compiler propagates shardings without Shardy."""
        layout = self._layout(mesh, zip(self.operands, operands, strict=True))
        return tuple(
            NamedSharding(mesh, layout.spec(words, x.shape))
            for words, x in zip(self.results, results, strict=True)
        )

    def _layout(self, mesh: Any, arrays: Any) -> Any:
        return self.rule.layout(
            dict(mesh.shape), [(words, _mesh_axes(x)) for words, x in arrays]
        )

    def _on_device(self, layout: Any, *arrays: Any) -> tuple[Any, ...]:
        shard = self.rule.shard(layout) if layout.spread else None
        with_results = zip(self.traced(shard, *arrays), self.results, strict=True)
        if not self.summed:
            return tuple(x for x, _ in with_results)
        used = {axis for axes in layout.spread.values() for axis in axes}
        found = []
        for x, words in with_results:
            missing = used.difference(*map(layout.axes, words))
            found.append(jax.lax.psum(x, tuple(sorted(missing))) if missing else x)
        return tuple(found)

    def traced(self, shard: Any, *arrays: Any) -> tuple[Any, ...]:
        """Runs the function; no region is made inside it."""
        token = _inside.set(True)
        try:
            return self.function(shard, *arrays)
        finally:
            _inside.reset(token)


def _mesh_axes(x: Any) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each axis of an array whose sharding the compiler names."""
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
    entries = [e if isinstance(e, tuple) else () if e is None else (e,) for e in spec]
    return entries + [()] * (len(x.shape) - len(entries))


# ---- where a region is made ---------------------------------------------------------------------


def may_be_sharded(arrays: Any) -> bool:
    """Returns whether the compiler may find one of the arrays sharded, as their types say."""
    # an interpreted kernel calls back to the host, which JAX cannot do in a partitioned part
    if _inside.get() or interpreting():
        return False
    leaves = jax.tree.leaves(arrays)
    if not any(isinstance(x, compat.Tracer) for x in leaves):
        return False
    return any(map(_automatic, (*map(compat.mesh_of, leaves), *compat.ambient_mesh())))


def _automatic(mesh: Any) -> bool:
    """Returns whether the compiler shards arrays over an axis of ``mesh``, and no type does."""
    if mesh is None or mesh.empty:
        return False
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = [n for n, kind in kinds.items() if kind == jax.sharding.AxisType.Auto]
    explicit = jax.sharding.AxisType.Explicit in kinds.values()
    return not explicit and any(mesh.shape[axis] > 1 for axis in auto)


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

    ``operands``: the words of the arrays' axes; ``results``: gives those of the results from their
    types. The rest is as in ``Region``.
    """
    region = Region(function, rule, tuple(operands), (), summed)
    return tuple(_bind(region, arrays, results))


def _bind(region: Region, arrays: Sequence[Any], results: Any = None) -> list[Any]:
    jaxpr = jax.make_jaxpr(partial(region.traced, None))(*arrays)
    if results is not None:
        region = replace(region, results=tuple(results(jaxpr.out_avals)))
    return _region.bind(*arrays, region=region, jaxpr=jaxpr)


_region = Primitive("ejkernel_region")
_region.multiple_results = True
compat.needs_devices(_region)


@_region.def_impl
def _run(*arrays: Any, region: Region, jaxpr: Any) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*arrays)


@_region.def_abstract_eval
def _abstract(*avals: Any, region: Region, jaxpr: Any) -> list[Any]:
    meshes = (aval.sharding.mesh for aval in avals)
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    return [compat.on_mesh(aval, mesh) for aval in jaxpr.out_avals]


def _batch(arrays: Any, dims: Any, *, region: Region, jaxpr: Any) -> Any:
    dims = [None if d is batching.not_mapped else d for d in dims]
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    results = _bind(region.mapped(dims, size), arrays)
    return results, [0] * len(results)


batching.primitive_batchers[_region] = _batch


def _lower(context: Any, *operands: Any, region: Region, jaxpr: Any) -> Any:
    if not compat.is_partitioned(context):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(context, *operands)

    @custom_partitioning
    def partitioned(*arrays: Any) -> tuple[Any, ...]:
        # JAX reads types off it, no more: where it would run it, the region is inlined
        return tuple(jnp.zeros(aval.shape, aval.dtype) for aval in jaxpr.out_avals)

    partitioned.def_partition(
        region.partition,
        infer_sharding_from_operands=region.infer_result_shardings,
        sharding_rule=region.shardy_rule,
    )
    return mlir.lower_fun(partitioned, multiple_results=True)(context, *operands)


mlir.register_lowering(_region, _lower)
