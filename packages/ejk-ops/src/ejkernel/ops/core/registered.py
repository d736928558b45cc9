"""RegisteredKernel: a kernel whose implementations come from the registry."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np

from ejkernel.ops.core.invocation import BoundCall, Invocation
from ejkernel.ops.core.kernel import Kernel, Support
from ejkernel.ops.core.samples import random_like
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.errors import ConfigError, KernelNotSupported, warn_once
from ejkernel.ops.implementation import Implementation, LazyLoadError, Resolved, run_signature
from ejkernel.ops.interpret import interpreting
from ejkernel.ops.kernel_registry import KernelRegistry, Survey, kernel_registry
from ejkernel.ops.platforms import Backend, Platform, parse_platform
from ejkernel.ops.utils.device import target_device


def _passed_over(call: BoundCall) -> dict[str, Exception]:
    """Names of implementations whose heuristic failed for this call, and the errors."""
    return call.remember("passed over", dict)


class RegisteredKernel(Kernel[Cfg, Out]):
    """Looks up its implementations by name; knowledge of tiles stays with each of them.

    Heuristics, candidates and sample inputs come from the implementations that support the call.
    Every config made here names the platform it was made for. A subclass defines ``run`` for
    its signature, which names the arguments; it is never called.

    Args:
        name: name of the algorithm in the registry; None = the class attribute ``algorithm``.
        version: as for Kernel.
        config_cls: class of the configs; None = the first type argument.
        registry: where to look; None = the shared registry.
    """

    algorithm: str | None = None

    def __init__(
        self,
        name: str | None = None,
        *,
        version: int = 1,
        config_cls: type | None = None,
        registry: KernelRegistry | None = None,
    ):
        super().__init__(name or self.algorithm, version=version, config_cls=config_cls)
        self.registry = kernel_registry if registry is None else registry

    def _undefined_run(self) -> NoReturn:
        """TypeError with the signature that ``run`` is to have."""
        text = (
            f"{type(self).__name__} defines no run method, whose signature names the arguments of "
            f"{self.name!r}"
        )
        for impl in self.registry.list_implementations(self.name):
            try:
                taken = run_signature(impl.load(), impl.name)
            except (LazyLoadError, ValueError):
                continue
            raise TypeError(
                f"{text}: add def run{taken}, as {impl.name} takes them; it is never called"
            )
        raise TypeError(f"{text}: add def run(self, ..., *, cfg); it is never called")

    # ---- which implementation --------------------------------------------------------------

    def implementation(self, inv: Invocation, platform: Platform | None) -> Resolved:
        """The registered implementation that runs the call; see ``KernelRegistry.get``."""
        call = inv.bound
        impl = self.registry.pick(self.survey(call, platform), call)
        axes = call.route.sequence_axes
        return Resolved(impl.fn, impl.platform, impl, impl.name, impl.differentiable, axes)

    def survey(self, call: BoundCall, platform: Platform | None) -> Survey:
        """Every implementation with the reason why it can or cannot do the call."""
        target, registry = target_device(), self.registry
        registry.load_for(platform, target)
        survey = call.remember(
            (Survey, self, platform, registry.version, target, interpreting()),
            lambda: registry.survey(self.name, platform, call.route.backend, inv=call),
        )
        passed = _passed_over(call)
        if passed:
            refused = [
                (i, _why_passed_over(passed[i.name])) for i in survey.usable if i.name in passed
            ]
            usable = tuple(i for i in survey.usable if i.name not in passed)
            survey = replace(survey, usable=usable, refused=(*survey.refused, *refused))
        return survey

    def usable_implementations(self, inv: Invocation) -> tuple[str, ...]:
        return tuple(i.name for i in self.survey(inv.bound, inv.route.platform).usable)

    def _pass_over(self, impl: Implementation, call: BoundCall, error: Exception) -> None:
        """Take the next implementation for this call, as the heuristic of ``impl`` failed.

        Raises:
            TypeError: the arguments do not fit the kernel, which is no fault of the heuristic.
        """
        call.arguments  # noqa: B018 (binds them)
        _passed_over(call)[impl.name] = error
        warn_once(
            ("heuristic", impl.name, impl.origin),
            f"{impl.name} of {impl.origin} is passed over: {_why_passed_over(error)}",
            stacklevel=6,
        )

    def supports(
        self, *args: Any, platform: str | Platform | None = None, **kwargs: Any
    ) -> Support:
        """Returns whether the call can be done on the target device; never raises for a bad call.

        Without arguments: whether ``platform`` implements the algorithm at all, on any device.
        """
        if not args and not kwargs:
            return self._supports_at_all(parse_platform(platform))
        return super().supports(*args, platform=platform, **kwargs)

    def _supports_at_all(self, platform: Platform | None) -> Support:
        implementations = self.registry.list_implementations(self.name)
        if any(platform in (None, impl.platform) for impl in implementations):
            return Support(True)
        missing = platform.value if platform else self.name
        nearest = implementations[0].platform.value if implementations else None
        return Support(False, f"no {missing} implementation installed", "platform", nearest)

    # ---- configs ---------------------------------------------------------------------------

    def make_config(self, fields: Mapping[str, Any] | None, impl: Implementation) -> Cfg:
        """A config of ``impl`` from the plain fields that it gave."""
        named = {**(fields or {}), "platform": impl.platform.value}
        cls: Any = impl.config_cls if self.config_cls is None else self.config_cls
        if cls is None:
            return cast(Cfg, named)
        return cls.from_dict(named) if hasattr(cls, "from_dict") else cls(**named)

    def heuristic_cfg(self, inv: Invocation) -> Cfg:
        """The heuristic config of the implementation that automatic choice would take.

        An implementation whose heuristic fails is named in a warning, and this call does without
        it.
        """
        call = inv.bound
        while True:
            try:
                impl = cast(Implementation, self.implementation(call, call.route.platform).impl)
            except KernelNotSupported as error:
                failed = [error.__cause__, *_passed_over(call).values()]
                raise error from failed[-1]
            try:
                return self.make_config(_heuristic_fields(impl, call), impl)
            except Exception as error:
                self._pass_over(impl, call, error)

    def config_space(self, inv: Invocation) -> Sequence[Cfg]:
        """Candidates of every implementation that supports the call, best platform first."""
        call = inv.bound
        configs: list[Cfg] = []
        for impl in self.survey(call, call.route.platform).usable:
            # an interpreted kernel's time says nothing about the hardware it is written for
            at_home = impl.backend in (Backend.ANY, target_device().kind)
            candidates = impl.candidates if at_home else None
            try:
                proposed = list(candidates(call) if candidates else [_heuristic_fields(impl, call)])
            except Exception as error:  # of one implementation: the others compete without it
                if candidates:
                    _warn(impl, "candidates", error)
                else:
                    self._pass_over(impl, call, error)
                continue
            for fields in proposed:
                try:
                    cfg = self.make_config(fields, impl)
                except ConfigError:
                    continue  # outside what the operation allows
                if cfg not in configs:
                    configs.append(cfg)
        return configs

    def sample_inputs(self, inv: Invocation, rng: np.random.Generator) -> tuple[tuple, dict]:
        """Returns valid inputs made by the implementation; others are taken from the call."""
        call = inv.bound
        arguments: dict[str, Any] = {}
        for impl in self.survey(call, call.route.platform).usable:
            if impl.sample_inputs is None:
                continue
            try:
                args, kwargs = impl.sample_inputs(call, rng)
                arguments = dict(self.signature.bind_partial(*args, **kwargs).arguments)
                break
            except Exception as error:
                _warn(impl, "sample_inputs", error)
        others = {k: v for k, v in call.arguments.items() if k not in arguments}
        return (), {**random_like(others, rng), **arguments}

    def config_tables(self, inv: Invocation) -> Sequence[Any]:
        """Tables shipped with the kernel packages that were loaded for this call."""
        self.registry.load_for(inv.route.platform, target_device())
        return self.registry.config_tables

    @property
    def state(self) -> Hashable:
        return self.registry.version

    def not_chosen(
        self, inv: Invocation, resolved: Resolved | None, cfg: Any
    ) -> tuple[tuple[str, str], ...]:
        """``(name, reason)`` of every implementation but ``resolved``."""
        call, requested = inv.bound, inv.route.platform
        configured = self.config_platform(cfg)
        self.registry.load()  # also packages that this device would never need
        survey = self.survey(call, None)
        chosen = None if resolved is None else resolved.impl
        ours = 0 if chosen is None else chosen.priority_of(call)
        rows = []
        for impl in survey.usable:
            if impl is chosen:
                continue
            if requested is not None and impl.platform is not requested:
                reason = f"platform={requested.value!r} was asked for"
            elif chosen is not None and ours > (this := impl.priority_of(call)):
                reason = f"{chosen.name} has priority {ours}, this {this}"
                reason += "" if impl.priority_for is None else " for this call"
            elif configured is not None and impl.platform is not configured:
                reason = f"the config is for platform {configured.value!r}"
            else:
                reason = "another one of the same priority goes first"
            rows.append((impl, reason))
        rows += [(i, why) for i, why in survey.refused if i is not chosen]
        return tuple((i.name, f"{why} ({i.replacement})" if i.replaces else why) for i, why in rows)


def _why_passed_over(error: Exception) -> str:
    return f"its heuristic failed: {type(error).__name__}: {error}"


def _heuristic_fields(impl: Implementation, call: BoundCall) -> Mapping[str, Any]:
    return impl.heuristic(call) if impl.heuristic else {}


def _warn(impl: Implementation, hook: str, error: Exception) -> None:
    warn_once(
        (hook, impl.name),
        f"{hook} of {impl.name} are left out: {type(error).__name__}: {error}",
        stacklevel=5,
    )
