"""Kernel: the base class of every operation."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from ejkernel.ops.config.key_distance import NO_RULES
from ejkernel.ops.core.distribution import LocalCall, distribute_by_specs
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.samples import random_like
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.core.vjp import call_with_custom_vjp
from ejkernel.ops.errors import ConfigError, KernelNotFound, KernelNotSupported
from ejkernel.ops.execution.executor import get_default_executor, route_of, split_options
from ejkernel.ops.execution.lowering import config_error
from ejkernel.ops.implementation import Resolved
from ejkernel.ops.params import OpConfig
from ejkernel.ops.platforms import Platform, parse_platform
from ejkernel.ops.second_order import attribute_to
from ejkernel.ops.utils.allowed import allow_in_files
from ejkernel.ops.utils.device import target_device


@functools.lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a run method without ``self`` and ``cfg``."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    return signature.replace(parameters=[p for p in parameters if p.name != "cfg"])


class Kernel(Generic[Cfg, Out]):
    """An operation with tunable implementations.

    A subclass defines ``run(self, *args, cfg, **kwargs)``, or ``run_triton``, ``run_pallas``,
    ``run_xla``, ``run_cuda`` for single platforms. ``heuristic_cfg`` gives a config from shapes,
    ``config_space`` the candidates of autotuning; a kernel that overrides neither runs with
    ``cfg=None``. The methods that run must be traceable by ``jax.jit``: Python bools, ints,
    floats, strings and other objects are static, arrays are traced. They may return other things
    than arrays, but such a call is traced afresh every time.

    Args:
        name: name in keys and messages; None = name of the class.
        version: raised when old configs no longer fit; enters every key.
        config_cls: class of the configs; None = the first type argument of ``Kernel[Cfg, Out]``.
    """

    config_cls: type | None = None
    trained = True
    """Whether calls are usually differentiated: tuning then ranks by both passes together.

    Not those with ``constant_arguments``, such as matrices stored in 8 bits.
    """
    similarity = NO_RULES
    """Which arguments tiles do not depend on, for the nearest entry of a shipped table."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        allow_in_files(cls)
        for base in vars(cls).get("__orig_bases__", ()):
            origin, args = typing.get_origin(base), typing.get_args(base)
            if args and isinstance(origin, type) and issubclass(origin, Kernel):
                named = isinstance(args[0], type) and args[0] is not object
                cls.config_cls = args[0] if named else None
        if cls.config_cls is not None:
            allow_in_files(cls.config_cls)

    def __init__(
        self, name: str | None = None, *, version: int = 1, config_cls: type | None = None
    ):
        self.name = type(self).__name__ if name is None else name
        self.version = version
        if config_cls is not None:
            self.config_cls = allow_in_files(config_cls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, version={self.version})"

    def __call__(self, *args: Any, cfg: Any = None, **kwargs: Any) -> Out:
        """Run through the default executor; ``platform``, ``mesh``, ... as in ``Executor``."""
        return get_default_executor()(self, *args, cfg=cfg, **kwargs)

    # ---- what a subclass says -------------------------------------------------------------

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """The operation itself, for every platform without a method of its own."""
        raise NotImplementedError(f"{self.name} does not define run")

    def heuristic_cfg(self, inv: Invocation) -> Cfg:
        """A config from shapes alone; default: the first of ``config_space``."""
        for cfg in self.config_space(inv):
            return cfg
        raise NotImplementedError(f"{self.name} has no heuristic_cfg and an empty config_space")

    def config_space(self, inv: Invocation) -> Sequence[Cfg]:
        """The configs worth trying for this call; default: none."""
        return ()

    def custom_vjp(
        self, primals: tuple, cfg: Cfg, kwargs: Mapping[str, Any], cotangents: tuple
    ) -> tuple:
        """Gradients of the positional arguments; not overridden = JAX differentiates ``run``.

        Args:
            primals: the positional arguments.
            cfg: the config that the forward pass used.
            kwargs: the keyword arguments.
            cotangents: one cotangent per leaf of the output.

        Returns:
            One entry per positional argument, a pytree like it or None for zero; or
            ``(that tuple, {keyword: gradient})``. Gradients are cast to the dtype of the argument.
        """
        raise NotImplementedError(f"{self.name} does not define custom_vjp")

    def sample_inputs(self, inv: Invocation, rng: np.random.Generator) -> tuple[tuple, dict]:
        """Returns concrete inputs shaped like the call's: random floats, zeros for integers."""
        return random_like((inv.abstract_args, inv.abstract_kwargs), rng)

    def constant_arguments(self, inv: Invocation) -> Collection[str]:
        """Returns the arguments of a call that have no gradient though they are floats, by name."""
        return ()

    def key_arguments(self, inv: Invocation) -> Mapping[str, Any]:
        """Returns the arguments that the key describes, by name; default: all."""
        return inv.arguments

    def bucket(self, inv: Invocation) -> Mapping[str, Sequence[int]] | None:
        """Shapes that the key shall hold instead of the exact ones, by array name.

        An array inside a pytree argument is named like ``mask_info.q_segment_ids``.
        """
        return None

    def config_tables(self, inv: Invocation) -> Sequence[Any]:
        """Paths of shipped tables of tuned configs for this call; default: none."""
        return ()

    @property
    def state(self) -> Hashable:
        """A hashable that differs after a change outside the kernel that may change its program."""
        return None

    # ---- the steps of a call --------------------------------------------------------------

    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """First step, outside any trace: checks that need values, Python seeds to arrays, ...

        Must accept abstract arguments and its own result.
        """
        return args, kwargs

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Second step, inside the trace: validates and canonicalizes the arguments."""
        return args, kwargs

    def distributes(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Returns whether a bound call without mesh and specs goes to ``distribute``."""
        return False

    def distribute(
        self, args: tuple, kwargs: dict[str, Any], placement: tuple[Any, Any, Any], call: LocalCall
    ) -> Any:
        """Third step, for calls over a mesh: run ``call(args, kwargs)`` on every shard.

        ``placement``: the mesh, in_specs and out_specs. By default ``in_specs`` follow the array
        arguments in order, missing ones and None are replicated, and ``out_specs`` defaults to the
        first spec.
        """
        order = list(self.signature.parameters)
        ordered = sorted(kwargs, key=lambda n: order.index(n) if n in order else len(order))
        named = {name: kwargs[name] for name in ordered}
        return distribute_by_specs(self.name, args, named, placement, call)

    def implementation(self, inv: Invocation, platform: Platform | None) -> Resolved:
        """Fourth step: the function that runs this call on ``platform`` (None = any).

        Raises:
            KernelNotSupported: no method fits.
        """
        target = target_device()
        native = target.native_platform
        methods = self._run_methods()
        if platform is not None:
            method = methods.get(f"run_{platform.value}")
            if method is None and platform is native:
                method = methods.get("run")
            if method is None:
                raise KernelNotSupported(
                    algorithm=self.name,
                    platform=platform.value,
                    reason=f"the kernel defines no run_{platform.value} "
                    f"(it defines {', '.join(methods) or 'no run method'})",
                    nearest=self._nearest(methods, native),
                )
            return self._resolved(method, platform, methods, "another platform was asked for")
        order = [native, *([Platform.CUDA] if target.is_nvidia else []), Platform.XLA]
        for candidate in order:
            method = methods.get(f"run_{candidate.value}")
            if method is not None:
                return self._resolved(method, candidate, methods, "comes later in the order")
        if "run" in methods:
            return self._resolved(methods["run"], None, methods, f"no {target.kind.value} path")
        raise KernelNotSupported(
            algorithm=self.name,
            reason="the kernel defines neither run nor a run_<platform> for "
            f"{target.kind.value} devices (it defines {', '.join(methods) or 'no run method'})",
        )

    def usable_implementations(self, inv: Invocation) -> tuple[str, ...]:
        """Names of the registered implementations among which this call has a choice.

        They may differ between calls of one key, which holds no values of floats.
        """
        return ()

    def runner(self, resolved: Resolved, cfg: Cfg) -> Callable[..., Out]:
        """Last step: the function that runs bound arguments, differentiated by ``custom_vjp``."""

        def run(*args: Any, **kwargs: Any) -> Out:
            with attribute_to(self.name):
                if self.has_custom_vjp:
                    return call_with_custom_vjp(self, resolved.fn, args, kwargs, cfg)
                return resolved.fn(*args, cfg=cfg, **kwargs)

        return run

    def not_chosen(
        self, inv: Invocation, resolved: Resolved | None, cfg: Any
    ) -> tuple[tuple[str, str], ...]:
        """``(name, reason)`` of every implementation but ``resolved``."""
        return () if resolved is None else resolved.skipped

    # ---- what can be asked about a kernel --------------------------------------------------

    def supports(
        self, *args: Any, platform: str | Platform | None = None, **kwargs: Any
    ) -> Support:
        """Returns whether a call is supported; without arguments, whether the platform is at all.

        Never raises for a call that cannot be done: the answer carries the reason. ``cfg``,
        ``mesh`` and specs count as in the call.
        """
        of_a_call = bool(args or kwargs)
        if not of_a_call:
            parse_platform(platform)
        try:
            options, arguments = split_options({**kwargs, "platform": platform})
            cfg, route = route_of(self, options)
            inv = Invocation(self, args, arguments, route=route)
            call = inv.bound if of_a_call else inv
            self.implementation(call, route.platform)
            if cfg is not None:
                cfg = self.convert_config(cfg, call)
                error = config_error(call.bound, cfg)
                if error is not None:
                    return Support(False, str(error), "cfg")
        except KernelNotSupported as error:
            return Support(False, error.reason, error.argument, error.nearest)
        except (KernelNotFound, TypeError, ValueError) as error:
            return Support(False, str(error), self._argument_of(str(error)))
        return Support(True)

    def says(self, *methods: str) -> bool:
        """Returns whether the subclass, or the object itself, overrides one of these methods."""
        cls, attributes = type(self), vars(self)
        return any(getattr(cls, m) is not getattr(Kernel, m) or m in attributes for m in methods)

    @property
    def has_custom_vjp(self) -> bool:
        return self.says("custom_vjp")

    @property
    def has_tunables(self) -> bool:
        """Returns whether the kernel declares configs at all; else it runs with ``cfg=None``."""
        return self.says("heuristic_cfg", "config_space")

    @property
    def signature(self) -> inspect.Signature:
        """The arguments of ``run`` without ``cfg``."""
        methods = self._run_methods()
        method = methods.get("run") or next(iter(methods.values()), None) or self._undefined_run()
        return _signature(getattr(method, "__func__", method))

    def convert_config(self, cfg: Any, inv: Invocation | None = None) -> Cfg:
        """``cfg`` as an instance of the kernel's config class.

        Args:
            cfg: a config, or a mapping of its fields.
            inv: the call that the config is for, where known.

        Raises:
            TypeError: a config of another class.
            ConfigError: an illegal field.
        """
        cls: Any = self.config_cls
        if cfg is None or cls is None:
            return cfg
        if isinstance(cfg, Mapping) and not issubclass(cls, Mapping):
            try:
                return cls.from_dict(cfg) if hasattr(cls, "from_dict") else cls(**cfg)
            except TypeError as error:
                raise ConfigError(f"{self.name}: cfg={dict(cfg)!r}: {error}") from None
        if not isinstance(cfg, cls):
            raise TypeError(
                f"{self.name}: cfg must be a {cls.__name__} or a mapping of its fields, "
                f"got {type(cfg).__name__}: {cfg!r}"
            )
        return cfg

    def config_platform(self, cfg: Any) -> Platform | None:
        """The platform that a config names, None for "auto" or when it names none."""
        name = getattr(cfg, "platform", None)
        if not isinstance(name, str):
            return None
        try:
            return parse_platform(name)
        except ValueError:
            if isinstance(cfg, OpConfig):
                raise
            return None  # a user's config may mean something else by the word

    # ---- helpers ---------------------------------------------------------------------------

    def _argument_of(self, reason: str) -> str | None:
        """The parameter that a reason begins with, None when it begins with another word."""
        try:
            names = self.signature.parameters
        except TypeError:  # no run method
            return None
        return next((word for word in re.findall(r"^\w+", reason) if word in names), None)

    def _undefined_run(self) -> Callable[..., Any]:
        """The method whose signature counts where the subclass defines none."""
        return self.run

    def _run_methods(self) -> dict[str, Callable[..., Any]]:
        """The run methods that the subclass defines, by name."""
        methods: dict[str, Callable[..., Any]] = {}
        run = self.run
        if getattr(run, "__func__", run) is not Kernel.run:
            methods["run"] = run
        for platform in Platform:
            name = f"run_{platform.value}"
            method = getattr(self, name, None)
            if method is not None:
                methods[name] = method
        return methods

    def _resolved(
        self, method: Callable[..., Any], platform: Platform | None, methods: dict, why: str
    ) -> Resolved:
        name = getattr(method, "__name__", "run")
        skipped = tuple((other, why) for other, m in methods.items() if m != method)
        return Resolved(method, platform, None, name, self.has_custom_vjp, skipped=skipped)

    def _nearest(self, methods: Mapping[str, Any], native: Platform) -> str | None:
        for platform in (native, Platform.CUDA, Platform.XLA):
            if f"run_{platform.value}" in methods:
                return platform.value
        return native.value if "run" in methods else None


@dataclass(frozen=True)
class Support:
    """The answer whether a call is supported; truthy iff ``ok``.

    Attributes:
        ok: yes or no.
        reason: why not, empty when ok.
        argument: the argument that stands in the way, None when no single one does.
        nearest: the platform that can do the call, None when unknown.
    """

    ok: bool
    reason: str = ""
    argument: str | None = None
    nearest: str | None = None

    def __bool__(self) -> bool:
        return self.ok
