"""Invocation: one call of a kernel before it runs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.config.key_distance import SimilarityRules
from ejkernel.ops.core.binding import Binding, BindingSteps, bind_shapes
from ejkernel.ops.core.keys import key_payload, payload_key
from ejkernel.ops.core.route import EXECUTOR_KEYWORDS, Route, specs_key
from ejkernel.ops.implementation import Resolved
from ejkernel.ops.platforms import Platform, parse_platform
from ejkernel.ops.utils.buckets import has_symbols, with_numbers
from ejkernel.ops.utils.device import device_fingerprint
from ejkernel.ops.utils.serialization import abstractify

T = TypeVar("T")
Config = TypeVar("Config", covariant=True)


class AnyKernel(BindingSteps, Protocol):
    """The members of a kernel that the framework uses; ``Kernel`` documents each."""

    name: str
    version: int
    config_cls: type | None
    trained: bool
    similarity: SimilarityRules

    @property
    def signature(self) -> inspect.Signature: ...
    @property
    def state(self) -> Hashable: ...
    @property
    def has_tunables(self) -> bool: ...
    @property
    def has_custom_vjp(self) -> bool: ...
    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]: ...
    def constant_arguments(self, inv: Invocation) -> Collection[str]: ...
    def key_arguments(self, inv: Invocation) -> Mapping[str, Any]: ...
    def bucket(self, inv: Invocation) -> Mapping[str, Sequence[int]] | None: ...
    def heuristic_cfg(self, inv: Invocation) -> Any: ...
    def config_space(self, inv: Invocation) -> Sequence[Any]: ...
    def config_tables(self, inv: Invocation) -> Sequence[Any]: ...
    def convert_config(self, cfg: Any, inv: Invocation | None = None) -> Any: ...
    def config_platform(self, cfg: Any) -> Platform | None: ...
    def sample_inputs(self, inv: Invocation, rng: np.random.Generator) -> tuple[tuple, dict]: ...
    def implementation(self, inv: Invocation, platform: Platform | None) -> Resolved: ...
    def usable_implementations(self, inv: Invocation) -> tuple[str, ...]: ...
    def runner(self, resolved: Resolved, cfg: Any) -> Callable[..., Any]: ...
    def not_chosen(
        self, inv: Invocation, resolved: Resolved | None, cfg: Any
    ) -> tuple[tuple[str, str], ...]: ...
    def custom_vjp(
        self, primals: tuple, cfg: Any, kwargs: Mapping[str, Any], cotangents: tuple
    ) -> tuple: ...


class KernelOf(AnyKernel, Protocol[Config]):
    """A kernel whose configs are of one type."""

    def heuristic_cfg(self, inv: Invocation) -> Config: ...


@dataclass(frozen=True, eq=False)
class Invocation:
    """One call of a kernel: its arguments and where it is asked to run.

    Attributes:
        kernel: the kernel that is called.
        args: positional arguments. Arrays, tracers or ShapeDtypeStructs besides static values.
        kwargs: keyword arguments, without the executor's.
        metadata: anything the caller wants to keep with the call; stored as given, never read.
        route: where the call is asked to run.
        prepared: whether the arguments went through ``kernel.prepare`` and are abstract.
    """

    kernel: AnyKernel
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    metadata: Any = None
    route: Route = field(default=Route(), kw_only=True, repr=False)
    prepared: bool = field(default=False, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs or {}))

    @functools.cached_property
    def info(self) -> Mapping[str, Any]:
        """The executor's knowledge by names: ``requested_platform``, ``mesh_axes``, ..."""
        return MappingProxyType(self.route.info())

    def __getstate__(self) -> dict[str, Any]:
        # What was derived from the fields may hold parts of a trace.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

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
        """Returns whether some array has a symbolic size."""
        return has_symbols((self.args, dict(self.kwargs or {})))

    @functools.cached_property
    def device_fingerprint(self) -> str:
        """The device that the call is meant for, equal for equal devices."""
        return self.route.device or device_fingerprint()

    @functools.cached_property
    def made(self) -> Invocation:
        """The call before it is bound, prepared and abstract: the form in keys and files."""
        if self.prepared:
            return self
        args, kwargs = self.kernel.prepare(self.args, dict(self.kwargs or {}))
        abstract = {"args": abstractify(args), "kwargs": abstractify(kwargs)}
        return dataclasses.replace(self, **abstract, prepared=True)

    @functools.cached_property
    def payload(self) -> Mapping[str, Any]:
        """The content that the key hashes, as JSON values."""
        if self.made is not self:
            return self.made.payload
        kernel = self.kernel
        return key_payload(
            kernel.name,
            kernel.version,
            kernel.key_arguments(self),
            kernel.bucket(self) or {},
            self.route,
            self.device_fingerprint,
        )

    @functools.cached_property
    def key(self) -> str:
        """The cache key; equal to ``default_key_builder_with_sharding`` of the same call."""
        return payload_key(self.payload) if self.made is self else self.made.key

    @functools.cached_property
    def bound(self) -> BoundCall:
        """The call with canonical arguments, made once.

        Only shapes are evaluated, and nothing of the kernel itself.

        Raises:
            Whatever ``prepare``, ``bind`` or ``distribute`` of the kernel raise.
        """
        made = self.made
        made.key  # noqa: B018 (by the devices and settings of now)
        kwargs = dict(made.kwargs or {})
        args, kwargs, route, binding = bind_shapes(self.kernel, made.args, kwargs, self.route)
        return BoundCall(
            self.kernel, args, kwargs, self.metadata, route=route, made=made, binding=binding
        )

    def abstract(self) -> Invocation:
        """A copy that holds no array, only shapes."""
        return dataclasses.replace(self, args=self.abstract_args, kwargs=self.abstract_kwargs)

    def with_numbers(self) -> Invocation:
        """Abstract, with large sizes in place of symbolic ones, for heuristics."""
        args, kwargs = with_numbers((self.abstract_args, self.abstract_kwargs))
        return dataclasses.replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True, eq=False)
class BoundCall(Invocation):
    """A call with canonical, abstract arguments; over a mesh, the call of one shard.

    ``Invocation.bound`` makes it, once; the hooks of kernels and implementations receive it. Its
    key is the key of the call as it was made.

    Attributes:
        made: the call before it was bound.
        binding: how to bind arrays of these shapes; None over a mesh.
        resolved: the implementation that runs it, None before it is chosen.
    """

    prepared: bool = field(default=True, init=False, repr=False)
    made: Invocation = field(default=cast(Any, None), kw_only=True, repr=False)
    binding: Binding | None = field(default=None, kw_only=True, repr=False)
    resolved: Resolved | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.made is None:
            made = Invocation(self.kernel, self.args, self.kwargs, route=self.route, prepared=True)
            object.__setattr__(self, "made", made)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"binding": None}  # it holds a trace

    @functools.cached_property
    def info(self) -> Mapping[str, Any]:
        """The executor's knowledge by names: also the key, and what runs once that is chosen."""
        shown = {**self.route.info(), "key": self.key}
        if self.resolved is not None:
            platform = self.resolved.platform
            shown["platform"] = None if platform is None else platform.value
            shown["implementation"] = self.resolved.name
        return MappingProxyType(shown)

    @functools.cached_property
    def bound(self) -> BoundCall:
        return self

    @functools.cached_property
    def _memory(self) -> dict[Hashable, Any]:
        return {}

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns ``make()`` of the first time this was asked for ``key``."""
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key]


def bind_by_name(
    kernel: AnyKernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
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
    kernel: AnyKernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Invocation:
    """The invocation of an executor call, the executor's own keywords moved into its route."""
    plain = {name: value for name, value in kwargs.items() if name not in EXECUTOR_KEYWORDS}
    route = Route(
        parse_platform(kwargs.get("platform")),
        mesh=kwargs.get("mesh"),
        in_specs=specs_key(kwargs.get("in_specs")),
        out_specs=specs_key(kwargs.get("out_specs")),
        batch_invariant=is_batch_invariant(),
    )
    return Invocation(kernel, args, plain, route=route)


def default_key_builder_with_sharding(
    kernel: AnyKernel, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
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
