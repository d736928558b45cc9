"""Abstract evaluation of the first steps of a call: what a kernel will see, without arrays."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.parts import Parts
from ejkernel.ops.utils.serialization import abstractify


class _Reached(Exception):
    """Carries the local invocation out of an abandoned trace."""

    def __init__(self, inv: Invocation):
        super().__init__("reached")
        self.inv = inv


def bind_abstract(inv: Invocation) -> Invocation:
    """The invocation that implementations see: bound, canonical, of one shard under a mesh.

    Only shapes are evaluated. The trace is abandoned as soon as the local call is known, so that
    nothing of the kernel itself is traced. The result keeps the key of ``inv``.

    Raises:
        Whatever ``kernel.prepare``, ``kernel.bind`` or ``kernel.distribute`` raise.
    """
    if inv.info.get("bound"):
        return inv
    kernel = inv.kernel
    if not inv.info.get("prepared"):
        args, kwargs = kernel.prepare(inv.args, dict(inv.kwargs or {}))
        inv = inv.replace(args=args, kwargs=kwargs, prepared=True)
    inv = inv.replace(key=inv.key, payload=inv.payload)
    mesh, in_specs, out_specs = (inv.info.get(k) for k in ("mesh", "in_specs", "out_specs"))
    given = not (mesh is in_specs is out_specs is None)
    if not (given or kernel.says("bind", "distributes")):
        return inv.abstract().replace(bound=True)

    parts = Parts.of((inv.abstract_args, inv.abstract_kwargs))

    def reach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _Reached(inv.replace(args=abstractify(args), kwargs=abstractify(kwargs), bound=True))

    def steps(*arrays: Any) -> Any:
        args, kwargs = kernel.bind(*parts.around(arrays))
        if given or kernel.distributes(args, kwargs):
            return kernel.distribute(args, kwargs, mesh, in_specs, out_specs, reach)
        return reach(args, kwargs)

    try:
        jax.eval_shape(steps, *parts.arrays)
    except _Reached as reached:
        return reached.inv
    raise TypeError(f"{kernel.name}.distribute returned without running the call")
