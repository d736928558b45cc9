"""Recorded calls in a file, and the calls behind the stamps of a lowered program.

Both give invocations that ``autotune_recorded`` tunes without running the program again. The file
is JSON: shapes, dtypes, shardings and static arguments of every call, no values of arrays. Classes
in it are looked up among those that ``utils.allowed`` has; a call that names another is left out.
Keys are computed from the calls: a file cannot have one call tuned in the name of another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ejkernel.ops import registry
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.route import Route, specs_key
from ejkernel.ops.errors import warn_once
from ejkernel.ops.platforms import Backend, Platform
from ejkernel.ops.recorded_values import (
    decode_mesh,
    decode_value,
    encode_mesh,
    encode_value,
    expect,
    expect_text,
)
from ejkernel.ops.utils.allowed import UnknownClass, allowed_class, class_name
from ejkernel.ops.utils.files import parse_json, read_text, write_output
from ejkernel.ops.utils.labels import find_labels_in_lowered, key_digits, stamped_calls

SCHEMA = 2
KIND = "ejkernel invocations"


def save_invocations(
    path: str | os.PathLike[str], invocations: Iterable[Invocation] | None = None
) -> int:
    """Write calls to a file, replacing it.

    Args:
        path: the file; its folder must exist.
        invocations: None = those recorded so far (``EJKERNEL_OPS_RECORD=1``).

    Returns:
        How many were written. A call whose static arguments have no JSON form (a callable, say)
        is left out with a warning.
    """
    calls = []
    for inv in registry.get_invocations() if invocations is None else invocations:
        try:
            calls.append(_encode_call(inv))
        except (TypeError, ValueError) as error:
            warn_once(
                ("save", inv.kernel.name), f"a call of {inv.kernel.name} is left out: {error}"
            )
    lines = ",\n  ".join(json.dumps(call) for call in calls)
    text = f'{{"schema": {SCHEMA}, "kind": {json.dumps(KIND)}, "calls": [\n  {lines}\n]}}\n'
    write_output(path, text)
    return len(calls)


def load_invocations(path: str | os.PathLike[str]) -> list[Invocation]:
    """The calls of a file that ``save_invocations`` wrote, as calls on the device at hand.

    Nothing is imported for the file, and no object is made whose class was not declared: a kernel
    is declared by its definition, other types by ``allow_in_files``. A call that names anything
    else, whose kernel has another version now, or that the kernel refuses, is left out with a
    warning.

    Raises:
        OSError: unreadable.
        ValueError: not such a file, or one that a newer version wrote.
    """
    try:
        content = parse_json(read_text(path))
        kind, schema, calls = content["kind"], content["schema"], content["calls"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no recorded calls: {error!r}") from None
    if kind != KIND or schema != SCHEMA or not isinstance(calls, list):
        raise ValueError(f"{path} holds {kind!r} of schema {schema!r}, expected {KIND!r}, {SCHEMA}")
    invocations = []
    for call in calls:
        try:
            invocations.append(_decode_call(call).bound)
        except Exception as error:  # whatever the classes raise for values that are none of theirs
            name = call.get("key") if isinstance(call, dict) else None
            told = f"{path}: a call is left out: {name!r}: {_reason(error)}"
            warn_once(("load", told), told)
    return invocations


def invocations_in_lowered(lowered: Any, known: Iterable[Invocation] = ()) -> list[Invocation]:
    """The calls behind the stamps of a lowered or compiled program, one per key, in order.

    Needs ``EJKERNEL_OPS_STAMP`` (hash or json) while the program is traced. This process knows
    what it stamped; of another process's program the hash stamps are looked up among ``known``
    and the recorded calls. Stamps with unknown calls are left out.

    Args:
        lowered: a ``jax.stages.Lowered`` or ``Compiled``.
        known: calls to look among, e.g. ``load_invocations(path)``.
    """
    by_digits = {key_digits(i.key): i for i in (*registry.get_invocations(), *known)}
    invocations: dict[str, Invocation] = {}
    for label in find_labels_in_lowered(lowered):
        calls = stamped_calls(label)
        if not calls and "#" in label:
            other = by_digits.get(label.rpartition("#")[2])
            calls = [] if other is None else [other]
        for inv in calls:
            invocations.setdefault(inv.key, inv)
    return list(invocations.values())


# ---- one call ----------------------------------------------------------------------------------


def _encode_call(inv: Invocation) -> dict[str, Any]:
    """A call as it was made, before it is bound, so that its key can be computed again."""
    kernel, route, made = inv.kernel, inv.route, inv.bound.made
    call = {
        "kernel": {
            "class": class_name(type(kernel)),
            "name": kernel.name,
            "version": kernel.version,
        },
        "key": made.key,
        "info": {
            **({} if route.platform is None else {"requested_platform": route.platform.value}),
            **({} if route.backend is None else {"requested_backend": route.backend}),
        },
        "mesh": None if route.mesh is None else encode_mesh(route.mesh),
        "specs": [encode_value(route.in_specs), encode_value(route.out_specs)],
        "args": [encode_value(x) for x in made.abstract_args],
        "kwargs": {k: encode_value(x) for k, x in made.abstract_kwargs.items()},
    }
    try:
        payload = _decode_call(call).payload
    except UnknownClass:  # the process that reads may know it
        return call
    if {**payload, "device": None} != {**made.payload, "device": None}:
        raise TypeError("its key depends on what a file cannot hold")
    return call


def _decode_call(call: Any) -> Invocation:
    expect(isinstance(call, dict), "a call", call)
    lists = ("args", "specs")
    parts = {name: call[name] for name in ("kernel", "info", "kwargs", *lists)}
    for name, value in parts.items():
        kind = list if name in lists else dict
        expect(isinstance(value, kind), f"{name!r} of a call", value)
    kernel = _find_kernel(parts["kernel"])
    mesh = None if call["mesh"] is None else decode_mesh(call["mesh"])
    specs = [specs_key(decode_value(x)) for x in parts["specs"]]
    expect(len(specs) == 2, "the specs of a call", specs)
    platform, backend = (parts["info"].get(f"requested_{name}") for name in ("platform", "backend"))
    route = Route(
        None if platform is None else Platform(expect_text(platform)),
        None if backend is None else Backend(expect_text(backend)).value,
        mesh,
        *specs,
    )
    args = tuple(decode_value(x) for x in parts["args"])
    kwargs = {k: decode_value(x) for k, x in parts["kwargs"].items()}
    return Invocation(kernel, args, kwargs, route=route)


def _find_kernel(described: Mapping[str, Any]) -> Any:
    cls = allowed_class(described["class"], Kernel)
    shared: Callable[[], Any] | None = getattr(cls, "shared", None)
    kernel = cls() if shared is None else shared()
    if (kernel.name, kernel.version) != (described["name"], described["version"]):
        raise ValueError(
            f"kernel {described['name']!r} version {described['version']!r} is now "
            f"{kernel.name} version {kernel.version}"
        )
    return kernel


def _reason(error: Exception) -> str:
    text = f"lacks {error}" if type(error) is KeyError else str(error)
    return text or type(error).__name__
