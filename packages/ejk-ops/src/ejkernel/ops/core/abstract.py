"""Abstract evaluation of the first steps of a call: what a kernel will see, without arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun

from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.parts import Parts
from ejkernel.ops.utils.serialization import abstractify


class _Reached(Exception):
    """Carries the local invocation out of an abandoned trace."""

    def __init__(self, inv: Invocation):
        super().__init__("reached")
        self.inv = inv


class Binding(NamedTuple):
    """What ``kernel.bind`` did with the arrays of a call, to be done again without asking it.

    Attributes:
        positions: where the arrays lie among the leaves of the call.
        program: a jaxpr, from them to the arrays of the bound call.
        bound: the bound call without those; what is numpy there is known and stays.
    """

    positions: tuple[int, ...]
    program: Any
    bound: Parts

    @property
    def types(self) -> tuple[Any, ...]:
        """``array_types`` of the arrays."""
        return tuple(map(_comparable, self.program.in_avals))

    def __call__(self, arrays: Sequence[Any]) -> Any:
        return self.bound.around(jaxpr_as_fun(self.program)(*arrays))


def array_types(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Hashable, equal for arrays that one trace serves."""
    return tuple([_comparable(jax.typeof(x)) for x in arrays])


def _comparable(t: Any) -> tuple[Any, ...]:
    # a mesh without axes may still name a device
    sharding = None if t.sharding.mesh.empty else t.sharding
    return t.shape, t.dtype, t.weak_type, sharding, getattr(t, "manual_axis_type", None)


def bind_abstract(inv: Invocation) -> Invocation:
    """The invocation that implementations see: bound, canonical, of one shard under a mesh.

    Only shapes are evaluated, and nothing of the kernel itself. Under a mesh the trace is abandoned
    as soon as the local call is known, else ``info["binding"]`` has it. The result keeps the key
    of ``inv``.

    Raises:
        Whatever ``kernel.prepare``, ``kernel.bind`` or ``kernel.distribute`` raise.
    """
    if inv.info.get("bound"):
        return inv
    kernel = inv.kernel
    if not inv.info.get("prepared"):
        args, kwargs = kernel.prepare(inv.args, dict(inv.kwargs or {}))
        inv = inv.replace(args=args, kwargs=kwargs, prepared=True)
    call = (inv.abstract_args, inv.abstract_kwargs)  # what a file of recorded calls keeps
    inv = inv.replace(key=inv.key, payload=inv.payload, call=call)
    placement = (inv.info.get("mesh"), inv.info.get("in_specs"), inv.info.get("out_specs"))
    given = placement != (None, None, None)
    if not (given or kernel.says("bind", "distributes")):
        return inv.abstract().replace(bound=True)

    parts = Parts.of(call)

    def reach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _Reached(inv.replace(args=abstractify(args), kwargs=abstractify(kwargs), bound=True))

    found: list[Any] = []

    def steps(*arrays: Any) -> Any:
        args, kwargs = kernel.bind(*parts.around(arrays))
        if given or kernel.distributes(args, kwargs):
            return kernel.distribute(args, kwargs, placement, reach)
        leaves, treedef = jax.tree_util.tree_flatten((args, kwargs))
        traced = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array))
        bound = Parts(treedef, leaves, traced)
        found.extend((abstractify((args, kwargs)), bound.without_arrays()))
        return bound.arrays

    try:
        program = jax.make_jaxpr(steps)(*parts.arrays)
    except _Reached as reached:
        return reached.inv
    if not found:
        raise TypeError(f"{kernel.name}.distribute returned without running the call")
    (args, kwargs), bound = found
    binding = Binding(parts.positions, program, bound)
    return inv.replace(args=args, kwargs=kwargs, bound=True, binding=binding)
