"""Binding: the first steps of a call for shapes alone, and again for arrays without asking it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend.core import jaxpr_as_fun

from ejkernel.ops.core.distribution import LocalCall
from ejkernel.ops.core.flat_tree import FlatTree
from ejkernel.ops.core.route import Route
from ejkernel.ops.utils.serialization import abstractify


class BindingSteps(Protocol):
    """The first steps of a call, as ``Kernel`` has them."""

    name: str

    def says(self, *methods: str) -> bool: ...
    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]: ...
    def distributes(self, args: tuple, kwargs: dict[str, Any]) -> bool: ...
    def distribute(
        self, args: tuple, kwargs: dict[str, Any], placement: tuple[Any, Any, Any], call: LocalCall
    ) -> Any: ...


class Binding(NamedTuple):
    """The work of ``kernel.bind`` on the arrays of a call, to be done again without asking it.

    Attributes:
        positions: where the arrays lie among the leaves of the call.
        program: a jaxpr, from them to the arrays of the bound call.
        bound: the bound call without those; its numpy arrays are constants.
    """

    positions: tuple[int, ...]
    program: Any
    bound: FlatTree

    @property
    def types(self) -> tuple[Any, ...]:
        """``array_types`` of the arrays."""
        return tuple(map(_comparable, self.program.in_avals))

    def __call__(self, arrays: Sequence[Any]) -> Any:
        return self.bound.with_arrays(jaxpr_as_fun(self.program)(*arrays))


def array_types(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Hashable, equal for arrays that one trace serves."""
    return tuple([_comparable(jax.typeof(x)) for x in arrays])


def _comparable(t: Any) -> tuple[Any, ...]:
    # a mesh without axes may still name a device
    sharding = None if t.sharding.mesh.empty else t.sharding
    return t.shape, t.dtype, t.weak_type, sharding, getattr(t, "manual_axis_type", None)


class _LocalCallReached(Exception):
    """Carries the call of one shard out of an abandoned trace."""

    def __init__(self, args: Any, kwargs: dict[str, Any], sequence_axes: tuple[str, ...]):
        super().__init__("reached")
        self.call = abstractify(args), abstractify(kwargs)
        self.sequence_axes = sequence_axes


def bind_shapes(
    kernel: BindingSteps, args: tuple[Any, ...], kwargs: dict[str, Any], route: Route
) -> tuple[tuple[Any, ...], dict[str, Any], Route, Binding | None]:
    """Binds an abstract, prepared call and distributes it, without running it.

    Returns:
        The canonical arguments, abstract, and the route. Over a mesh both belong to one shard:
        the trace is abandoned there, and no Binding is made. A kernel without such steps has none.

    Raises:
        Whatever ``kernel.bind`` or ``kernel.distribute`` raise.
    """
    if not (route.distributed or kernel.says("bind", "distributes")):
        return args, kwargs, route, None
    tree = FlatTree.flatten((args, kwargs))

    def reach(
        args: tuple[Any, ...], kwargs: dict[str, Any], sequence_axes: tuple[str, ...] = ()
    ) -> Any:
        raise _LocalCallReached(args, kwargs, sequence_axes)

    results: list[Any] = []

    def steps(*arrays: Any) -> Any:
        args, kwargs = kernel.bind(*tree.with_arrays(arrays))
        if route.distributed or kernel.distributes(args, kwargs):
            return kernel.distribute(args, kwargs, route.placement, reach)
        leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
        traced = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array))
        bound = FlatTree(treedef, tuple(leaves), traced)
        results.extend((abstractify((args, kwargs)), bound.without_arrays()))
        return bound.arrays

    try:
        program = jax.make_jaxpr(steps)(*tree.arrays)
    except _LocalCallReached as reached:
        return *reached.call, replace(route, sequence_axes=reached.sequence_axes), None
    if not results:
        raise TypeError(f"{kernel.name}.distribute returned without running the call")
    (args, kwargs), bound = results
    return args, kwargs, route, Binding(tree.positions, program, bound)
