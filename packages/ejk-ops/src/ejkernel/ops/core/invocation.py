"""Invocation: everything that is known about one call of a kernel before it runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from ejkernel.ops.core.keys import key_payload, payload_key
from ejkernel.ops.errors import InvalidArgument
from ejkernel.ops.platforms import parse_platform
from ejkernel.ops.utils.buckets import has_symbols, with_numbers
from ejkernel.ops.utils.device import device_fingerprint
from ejkernel.ops.utils.serialization import abstractify

if TYPE_CHECKING:
    from ejkernel.ops.core.kernel import Kernel

EXECUTOR_KEYWORDS = ("cfg", "platform", "mesh", "in_specs", "out_specs")
"""Keywords that belong to the executor, not to the kernel."""


@dataclass(frozen=True, eq=False)
class Invocation:
    """One call of a kernel: its arguments and what the executor knows about it.

    Attributes:
        kernel: the kernel that is called.
        args: positional arguments. Arrays, tracers or ShapeDtypeStructs besides static values.
        kwargs: keyword arguments, without those of the executor.
        metadata: anything the caller wants to keep with the call; stored as given, never read.
        info: what the executor knows, e.g. ``requested_platform``, ``platform``, ``mesh_axes``,
            ``in_specs``, ``out_specs``. Empty when the invocation was made by hand.
    """

    kernel: Kernel[Any, Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    metadata: Any = None
    info: Mapping[str, Any] = field(default_factory=dict, kw_only=True, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs or {}))
        object.__setattr__(self, "info", MappingProxyType(dict(self.info)))

    def __getstate__(self) -> dict[str, Any]:
        # What was worked out from the fields may hold parts of a trace.
        info = {name: value for name, value in self.info.items() if name != "binding"}
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"info": info}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments by name, defaults of the kernel's ``run`` applied, without ``cfg``.

        Raises:
            TypeError: the arguments do not fit the signature of ``run``.
        """
        return MappingProxyType(bind_by_name(self.kernel, self.args, self.kwargs or {}))

    @functools.cached_property
    def abstract_args(self) -> tuple[Any, ...]:
        """Positional arguments with every array as a ``jax.ShapeDtypeStruct`` (with sharding)."""
        return abstractify(self.args)

    @functools.cached_property
    def abstract_kwargs(self) -> dict[str, Any]:
        """Keyword arguments with every array as a ``jax.ShapeDtypeStruct`` (with sharding)."""
        return abstractify(dict(self.kwargs or {}))

    @functools.cached_property
    def symbolic(self) -> bool:
        """Whether some array has a symbolic size."""
        return has_symbols((self.args, dict(self.kwargs or {})))

    def with_numbers(self) -> Invocation:
        """Abstract, symbolic sizes taken for large ones: what heuristics see."""
        args, kwargs = with_numbers((self.abstract_args, self.abstract_kwargs))
        return self.replace(args=args, kwargs=kwargs)

    @functools.cached_property
    def device_fingerprint(self) -> str:
        """The device that the call is meant for, equal for equal devices."""
        return self.info.get("device_fingerprint") or device_fingerprint()

    @functools.cached_property
    def payload(self) -> Mapping[str, Any]:
        """What the key hashes, as JSON values."""
        known = self.info.get("payload")
        if known is not None:
            return known
        if not self.info.get("prepared"):
            args, kwargs = self.kernel.prepare(self.args, dict(self.kwargs or {}))
            return self.replace(args=args, kwargs=kwargs, prepared=True).payload
        return key_payload(self)

    @functools.cached_property
    def facts(self) -> dict[Any, Any]:
        """What kernels found out about the call, by kernel; for them to fill."""
        return {}

    @functools.cached_property
    def key(self) -> str:
        """The cache key; equal to ``default_key_builder_with_sharding`` of the same call."""
        return self.info.get("key") or payload_key(self.payload)

    def replace(
        self, *, args: Any = None, kwargs: Mapping[str, Any] | None = None, **info: Any
    ) -> Invocation:
        """A copy with other arguments or with entries of ``info`` added."""
        return Invocation(
            self.kernel,
            self.args if args is None else args,
            self.kwargs if kwargs is None else kwargs,
            self.metadata,
            info={**self.info, **info},
        )

    def abstract(self) -> Invocation:
        """A copy that holds no array, only shapes."""
        return self.replace(args=self.abstract_args, kwargs=self.abstract_kwargs)


def bind_by_name(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by name as ``kernel.run`` would see them, defaults applied."""
    signature = kernel.signature
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{kernel.name}: {error}") from None
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        else:
            arguments[name] = value
    return arguments


def call_invocation(
    kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Invocation:
    """The invocation of an executor call, the executor's own keywords moved into ``info``."""
    plain = {name: value for name, value in kwargs.items() if name not in EXECUTOR_KEYWORDS}
    platform = parse_platform(kwargs.get("platform"))
    info: dict[str, Any] = {"requested_platform": None if platform is None else platform.value}
    specs = (specs_key(kwargs.get(name)) for name in ("in_specs", "out_specs"))
    return Invocation(
        kernel, args, plain, info=info | distribution_info(kwargs.get("mesh"), *specs)
    )


def default_key_builder_with_sharding(
    kernel: Kernel[Any, Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> str:
    """The cache key of ``kernel(*args, **kwargs)``, sharding of the arrays included.

    Args:
        kernel: the kernel.
        args: positional arguments: arrays, tracers, ShapeDtypeStructs or static values.
        kwargs: keyword arguments; ``platform``, ``mesh``, ``in_specs`` and ``out_specs`` mean what
            they mean to the executor, ``cfg`` is ignored.

    Returns:
        A string that is equal in every process for equal devices, kernels, structure, dtypes,
        bucketed shapes, shardings and static arguments, whatever the values of arrays and floats.

    Raises:
        TypeError: the arguments do not fit the kernel's ``run``.
    """
    return call_invocation(kernel, tuple(args), dict(kwargs or {})).key


def specs_key(specs: Any) -> Any:
    """Partition specs as a hashable."""
    return tuple(specs) if isinstance(specs, list) else specs


def distribution_info(mesh: Any, in_specs: Any, out_specs: Any) -> dict[str, Any]:
    """What ``Invocation.info`` says about a distributed call; nothing for other calls."""
    if mesh is in_specs is out_specs is None:
        return {}
    info = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    if mesh is not None:
        if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
            raise InvalidArgument(f"mesh: expected jax.sharding.Mesh, given {mesh!r}")
        info["mesh_axes"] = tuple(mesh.shape.items())
    return info
