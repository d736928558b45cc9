"""Registry of implementations: the code for an algorithm, its hardware and its priority."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from importlib.metadata import EntryPoint
from typing import Any

from ejkernel.ops import discovery, lookup
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.errors import warn_once
from ejkernel.ops.implementation import (
    Implementation,
    KernelSpec,
    LazyLoadError,
    normalized,
    signature_differences,
    table,
)
from ejkernel.ops.lookup import Refusal, Survey, filtered, misplaced, platforms_for, rank
from ejkernel.ops.platforms import Backend, Platform, parse_backend, parse_platform
from ejkernel.ops.registrations import Registrations, package_loading
from ejkernel.ops.utils.device import TargetDevice, target_device

__all__ = ["Implementation", "KernelRegistry", "KernelSpec", "Survey", "kernel_registry"]


class KernelRegistry(Registrations):
    """Implementations by algorithm, platform and backend.

    A registry made by hand holds only what is registered in it. The shared one,
    ``ejkernel.ops.kernel_registry``, also loads the installed kernel packages, each on the first
    look-up that may need it. Names are case-insensitive. All methods are thread safe.
    """

    def __init__(self, *, discover: Callable[[], Sequence[EntryPoint]] | None = None):
        super().__init__()
        self._packages = discovery.Packages(discover or tuple)
        self._replacements: list[Implementation] = []

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Kernels refer to the shared registry: their copies do too, and other processes have one.
        if self is kernel_registry:
            return "kernel_registry"
        return super().__reduce_ex__(protocol)

    # Loading of installed packages

    def installed(self) -> tuple[str, ...]:
        """Platforms for which a kernel package is installed. Imports nothing."""
        return self._packages.names()

    def load(self, platforms: Sequence[Platform] = tuple(Platform)) -> None:
        """Load the installed packages of ``platforms`` that are not loaded yet.

        A package that fails is left out as a whole; ``failure`` keeps the cause.
        """
        self._packages.load(platforms, self._use)

    def _use(self, point: EntryPoint) -> None:
        package = discovery.whose(point)
        token = package_loading.set(package)
        try:
            register = point.load()  # outside the lock: its modules may register when imported
            with self._lock:
                before = {name: list(entries) for name, entries in self._by_algorithm.items()}
                tables = list(self._config_tables)
                try:
                    register(self)
                except BaseException:
                    self._by_algorithm, self._config_tables = before, tables
                    raise
        finally:
            package_loading.reset(token)
        self._replacements += [i for i in self.replacements() if i.origin == package]

    def replacements(self) -> list[Implementation]:
        """Implementations that were registered in place of another package's or module's."""
        with self._lock:
            every = [i for implementations in self._by_algorithm.values() for i in implementations]
        return [i for i in every if i.replaces]

    def _warn_packages(self) -> None:
        self._packages.warn_failures()
        self._warn_replacements()

    def _warn_replacements(self) -> None:
        for i in self._replacements:
            warn_once(("replaced", i.name, i.origin), i.replacement, stacklevel=6)

    def failure(self, platform: str | Platform) -> Exception | None:
        """Returns why the installed package of ``platform`` could not be loaded, or None."""
        return self._packages.failure(parse_platform(platform))

    def failures(self) -> list[tuple[EntryPoint, Exception]]:
        """The installed packages that could not be loaded, each with the cause."""
        return self._packages.failures()

    # Look-up

    def survey(
        self,
        algorithm: str,
        platform: str | Platform | None = None,
        backend: str | Backend | None = None,
        *,
        inv: Any = None,
        device: Any = None,
    ) -> Survey:
        """Returns the implementations that can do the call, best first, and why others cannot.

        Arguments as for ``get``. Only packages that may be needed are loaded, and no kernel.
        """
        forced, hardware = parse_platform(platform), parse_backend(backend)
        target = target_device(device)
        self.load_for(forced, target)
        return self._survey(normalized(algorithm), forced, hardware, _bound(inv), target)

    def load_for(self, forced: Platform | None, target: TargetDevice) -> None:
        """Load the packages that may serve calls on a device, or one platform's."""
        self.load(platforms_for(target.kind) if forced is None else (forced,))
        if forced is None:
            self._packages.warn_failures()
        if self._replacements:
            self._warn_replacements()

    def _survey(
        self,
        algorithm: str,
        forced: Platform | None,
        backend: Backend | None,
        inv: Any,
        target: TargetDevice,
    ) -> Survey:
        with self._lock:
            implementations = list(self._by_algorithm.get(algorithm, ()))
        usable, refused = [], []  # of (rank, implementation), of (implementation, reason)
        for implementation in implementations:
            if forced is not None and implementation.platform is not forced:
                continue
            reason = filtered(implementation, backend)
            if reason is None:
                reason = misplaced(implementation, target, forced is not None)
                if reason is not None and forced is not None:
                    reason = lookup.with_reason_of_call(implementation, inv, reason)
            if reason is None:
                try:
                    reason = implementation.why_not(inv)
                    if reason is None:
                        usable.append((rank(implementation, target, inv), implementation))
                except LazyLoadError as error:
                    reason = str(error)
                    self._warn_unused(implementation, error)
                except Exception as error:
                    reason = f"it cannot say whether it can: {type(error).__name__}: {error}"
                    self._warn_unused(implementation, reason)
            if reason is not None:
                refused.append((implementation, reason))
        usable.sort(key=lambda pair: pair[0])
        refused.sort(key=lambda pair: rank(pair[0], target))
        return Survey(algorithm, forced, target, tuple(i for _, i in usable), tuple(refused))

    def resolve(
        self,
        algorithm: str,
        platform: str | Platform | None = None,
        backend: str | Backend | None = None,
        *,
        inv: Any = None,
        device: Any = None,
    ) -> Implementation:
        """Returns the record of the implementation that ``get`` returns; its function is loaded."""
        call = _bound(inv)
        return self.pick(self.survey(algorithm, platform, backend, inv=call, device=device), call)

    def pick(self, survey: Survey, inv: Any = None) -> Implementation:
        """The best implementation of a survey whose function can be loaded; errors as ``get``."""
        broken: list[Refusal] = []
        cause: Exception | None = None
        for implementation in survey.usable:
            try:
                implementation.fn  # noqa: B018 (loads it)
            except LazyLoadError as error:
                broken.append((implementation, str(error)))
                cause = error
                if survey.platform is None:
                    self._warn_unused(implementation, error)
                continue
            return implementation
        survey = with_fields(survey, usable=(), refused=(*survey.refused, *broken))
        error = self._no_implementation(survey, inv)
        raise error from (cause or self._packages.failure(survey.platform))

    def get(
        self,
        algorithm: str,
        platform: str | Platform | None = None,
        backend: str | Backend | None = None,
        *,
        inv: Any = None,
    ) -> Callable[..., Any]:
        """The function that does ``algorithm`` on the target device.

        Args:
            algorithm: name, case-insensitive.
            platform: None or "auto" takes, among the implementations for the device that support
                the call, the highest priority (ties: the device's own platform, then the one
                registered first); a named platform keeps to its own implementations.
            backend: keep only implementations for this hardware or for any.
            inv: the call. With it, implementations whose ``supports`` gives a reason are left out,
                and ``priority_for`` counts.

        Raises:
            ValueError: unknown platform or backend name.
            KernelNotFound: unknown algorithm, or nothing registered for the platform.
            KernelNotSupported: implementations exist, none can do the call here; says why.
        """
        return self.resolve(algorithm, platform, backend, inv=inv).fn

    def _warn_unused(self, implementation: Implementation, why: Exception | str) -> None:
        warn_once(
            ("unused", implementation.name),
            f"{implementation.name} is not used: {why}",
            stacklevel=5,
        )

    def _no_implementation(self, survey: Survey, inv: Any) -> Exception:
        self.load()
        algorithm, forced = survey.algorithm, survey.platform
        with self._lock:
            implementations = list(self._by_algorithm.get(algorithm, ()))
            names = sorted(self._by_algorithm)
        failure = self._packages.failure(forced)
        if not implementations and failure is None:
            return lookup.unknown_algorithm(algorithm, names, self._packages)
        everything = self._survey(algorithm, None, None, inv, survey.target)
        if forced is None:
            return lookup.nobody_supports(survey, everything, inv)
        if survey.refused:
            return lookup.forced_refuses(survey, everything, inv)
        if failure is not None:
            return lookup.package_failed(survey, everything, failure)
        return lookup.nothing_registered(survey, everything, implementations, self._packages)

    # Inspection

    def list_algorithms(self) -> list[str]:
        """Names of all algorithms, sorted. Loads every installed package, no kernel."""
        self.load()
        self._warn_packages()
        with self._lock:
            return sorted(self._by_algorithm)

    def list_implementations(self, algorithm: str) -> list[Implementation]:
        """All implementations of an algorithm, highest ``priority`` first; empty when unknown."""
        self.load()
        self._warn_packages()
        with self._lock:
            implementations = self._by_algorithm.get(normalized(algorithm), [])
            return sorted(implementations, key=lambda i: (-i.priority, i.order))

    def describe(self, algorithm: str | None = None) -> str:
        """Returns a table of implementations, one per line.

        "..., by call" after a priority: some calls have another (``priority_for``).
        """
        names = self.list_algorithms() if algorithm is None else [normalized(algorithm)]
        implementations = [i for name in names for i in self.list_implementations(name)]
        if not implementations:
            return f"nothing registered{'' if algorithm is None else f' for {algorithm!r}'}"
        return table(implementations)

    def validate_signatures(self, algorithm: str | None = None) -> list[str]:
        """Differences between the signatures of implementations, one per line; empty = none.

        Compares names, order, kinds, defaults, and annotations where both sides have them, with
        the implementation registered first. Loads every implementation it compares.
        """
        names = self.list_algorithms() if algorithm is None else [normalized(algorithm)]
        lines = []
        for name in names:
            implementations = sorted(self.list_implementations(name), key=lambda i: i.order)
            lines += signature_differences(implementations)
        return lines


def _bound(inv: Any) -> Any:
    """The call as implementations see it; tests may ask about anything else."""
    return inv.bound if isinstance(inv, Invocation) else inv


kernel_registry = KernelRegistry(discover=discovery.installed)
"""The shared registry: implementations of all installed kernel packages."""
