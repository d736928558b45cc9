"""A benchmark case: inputs, contenders, and the work that cannot be avoided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ejkernel.modules.workloads.call import Call

PLATFORMS = ("triton", "pallas", "cuda", "xla")


@dataclass(frozen=True)
class Case:
    """One row group of a table.

    ``contenders`` maps a name to a function of ``inputs()``; the first is ours. A value that is a
    string is the reason why that peer cannot take part. ``flops`` and ``moved`` are the forward's
    least operations and bytes. ``grad_argnums``: the inputs to differentiate; empty = forward only.
    ``call``: the call of the first contender, where it is one of an operation. ``updates``: inputs
    that a result takes the place of, by number, and the number of that result: forward passes are
    given them for good and have them back, as a server's caches.
    """

    name: str
    inputs: Callable[[], tuple]
    contenders: dict[str, Callable[..., Any] | str]
    flops: float
    moved: float
    dtype: str
    grad_argnums: tuple[int, ...] = ()
    backward_factor: float = 2.5
    notes: str = ""
    call: Call | None = None
    updates: Mapping[int, int] = field(default_factory=dict)


def forward_and_backward(fn: Callable, argnums: tuple[int, ...]) -> Callable:
    """Returns a function of ``fn`` and its gradients, the cotangent being the output."""

    def both(*args):
        def forward(*diff):
            full = list(args)
            for i, value in zip(argnums, diff, strict=True):
                full[i] = value
            return fn(*full)

        out, pull = jax.vjp(forward, *(args[i] for i in argnums))
        return out, pull(out)

    return both


def ours(call: Call, platform: str | None = None, cfg: Any = None) -> Callable[..., Any]:
    """Returns the operation as a function of the call's arrays in the order of ``make()``."""
    from ejkernel import modules

    names = call.names
    options = dict(call.options)
    if platform is not None:
        options["platform"] = platform
    if cfg is not None:
        options["cfg"] = cfg
    function = getattr(modules, call.operation)
    return lambda *arrays: function(**dict(zip(names, arrays, strict=True)), **options)


def case_of(call: Call, *, platforms: bool = True, peers: bool = True) -> Case:
    """Returns a case of the call: as it is, on each platform that can do it, and its peers.

    Args:
        call: the call.
        platforms: whether every platform of this device takes part by itself.
        peers: whether other libraries' functions take part.
    """
    from ejkernel.modules.bench.peers import peers_of

    contenders: dict[str, Callable[..., Any] | str] = {"ejkernel": ours(call)}
    if platforms and "platform" not in call.options:
        contenders |= {f"ejkernel-{p}": ours(call, p) for p in _worth_forcing(call)}
    if peers:
        contenders |= peers_of(call)
    return Case(
        call.name,
        lambda: tuple(call.make().values()),
        contenders,
        call.flops,
        call.moved,
        call.dtype,
        tuple(call.names.index(name) for name in call.gradients),
        call.backward_factor,
        notes=call.source,
        call=call,
        updates=_updates(call),
    )


def _updates(call: Call) -> dict[int, int]:
    """Returns arguments that the operation writes to, by index, and the results that hold them."""
    spec = call.kernel.spec
    outputs = enumerate(spec.output_axes({**spec.boundary.defaults, **call.abstract()}))
    return {call.names.index(axes[1:]): i for i, axes in outputs if axes.startswith("=")}


def _worth_forcing(call: Call) -> list[str]:
    """Returns the platforms that can do the call here, unless there is only one."""
    from ejkernel.modules import supports

    arguments = call.abstract()
    able = [p for p in PLATFORMS if supports(call.operation, platform=p, **arguments)]
    # XLA's form of a long attention call takes longer than all others together
    if len(able) > 1 and "xla" in able and call.flops > 1e12:
        able.remove("xla")
    return able if len(able) > 1 else []
