"""A part of a program that each device runs on its part of the arrays.

A *region*, one pass of a kernel, says the words of the axes of its operands and results. A rule
(``ShardingRule`` of ejk-types, or anything with its methods) turns them into a Shardy rule, by
which shardings propagate through the region, and into the layout in which each device runs the
region on its part. Maps and derivatives of a region are regions.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import NamedSharding

from ejkernel.ops import compat
from ejkernel.ops.core.flat_tree import replace_at

Words = tuple[str, ...]
MeshAxes = tuple[str, ...]
Function = Callable[..., tuple[Any, ...]]
Arrays = Iterable[tuple[Words, Any]]
"""Arrays with the words of their axes."""

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("ejkernel_region", default=False)


def inside_region() -> bool:
    """Returns whether what is being traced belongs to a region."""
    return _inside.get()


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
                values = function(shard, *replace_at(primals, smooth, floats))
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
