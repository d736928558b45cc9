"""Registry of implementations: which code can do an algorithm, on which hardware, how well."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

from ejkernel.ops import discovery
from ejkernel.ops.errors import (
    KernelNotFound,
    KernelNotSupported,
    KernelUnavailable,
    warn_once,
)
from ejkernel.ops.implementation import (
    Implementation,
    KernelSpec,
    LazyFunction,
    LazyLoadError,
    hard_differences,
    lazily,
    signature_of,
    soft_differences,
)
from ejkernel.ops.interpret import interpreting
from ejkernel.ops.platforms import (
    INTERPRETABLE,
    LEGAL_BACKENDS,
    Backend,
    Platform,
    parse_backend,
    parse_platform,
)
from ejkernel.ops.utils.device import TargetDevice, target_device

__all__ = ["Implementation", "KernelRegistry", "KernelSpec", "Survey", "kernel_registry"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Survey:
    """What the registry knows about one look-up.

    Attributes:
        algorithm: lower-case name.
        platform: the forced platform, None for automatic choice.
        target: the device looked up for.
        usable: implementations that can do it, best first.
        refused: the others that were considered, each with the reason why not.
    """

    algorithm: str
    platform: Platform | None
    target: TargetDevice
    usable: tuple[Implementation, ...]
    refused: tuple[tuple[Implementation, str], ...]


class KernelRegistry:
    """Implementations by algorithm, platform and backend.

    A registry made by hand holds only what is registered in it. The shared one,
    ``ejkernel.ops.kernel_registry``, also loads the installed kernel packages, each on the first
    look-up that may need it. Names are case-insensitive. All methods are thread safe.
    """

    def __init__(self, *, discover: Callable[[], Sequence[EntryPoint]] | None = None):
        self._discover = discover
        self._lock = threading.RLock()
        self._by_algorithm: dict[str, list[Implementation]] = {}
        self._config_tables: list[Path] = []
        self._loaded: set[tuple[str, str]] = set()
        self._failures: dict[str, Exception] = {}
        self._count = 0

    # Registration

    def register(
        self,
        algorithm: str,
        platform: str | Platform,
        backend: str | Backend,
        priority: int = 0,
        *,
        supports: Callable[[Any], str | None] | None = None,
        heuristic: Callable[..., Any] | None = None,
        candidates: Callable[..., Any] | None = None,
        sample_inputs: Callable[..., Any] | None = None,
        config_cls: type | None = None,
        version: int = 1,
        differentiable: bool = True,
        replace: bool = False,
    ) -> Callable[[F], F]:
        """Decorator that registers an implementation and returns it unchanged.

        All implementations of an algorithm have the same parameters, ``cfg`` aside: same names,
        order and kinds. Convention for ``priority``: native code 100, other accelerator paths 50,
        XLA 0. The meaning of the other arguments is that of the attributes of ``Implementation``.

        Raises:
            ValueError: unknown platform or backend, a backend the platform cannot run on, a
                registration that exists already (unless ``replace``), or a different signature.
        """
        record = self._prepare(
            algorithm, platform, backend, priority, version=version, differentiable=differentiable
        )
        record.update(
            supports=supports,
            heuristic=heuristic,
            candidates=candidates,
            sample_inputs=sample_inputs,
            config_cls=config_cls,
        )

        def decorate(fn: F) -> F:
            self._add(Implementation(function=fn, **record), replace)
            return fn

        return decorate

    def register_lazy(
        self,
        algorithm: str,
        platform: str | Platform,
        backend: str | Backend,
        priority: int = 0,
        *,
        target: str,
        supports: Callable[[Any], str | None] | str | None = None,
        heuristic: Callable[..., Any] | str | None = None,
        candidates: Callable[..., Any] | str | None = None,
        sample_inputs: Callable[..., Any] | str | None = None,
        config_cls: type | None = None,
        version: int = 1,
        differentiable: bool = True,
        replace: bool = False,
    ) -> None:
        """Register the function ``target="package.module:function"`` without importing it.

        The module is imported, and the signature compared with the others, when
        ``Implementation.fn`` is first read. ``supports``, ``heuristic``, ``candidates`` and
        ``sample_inputs`` may be such strings too, each imported on its first call, so that a
        package's ``register`` imports nothing:

            registry.register_lazy(
                "flash_attention", "xla", "any",
                target="ejkernel.kernels.xla.flash_attention.interface:flash_attention",
                supports="ejkernel.kernels.xla.flash_attention.tiles:supports",
            )

        A module that cannot be imported makes automatic choice pass on, with one warning; a
        forced platform raises. Other arguments and errors as for ``register``.
        """
        record = self._prepare(
            algorithm, platform, backend, priority, version=version, differentiable=differentiable
        )
        implementation = Implementation(
            function=LazyFunction(target),
            supports=lazily(supports),
            heuristic=lazily(heuristic),
            candidates=lazily(candidates),
            sample_inputs=lazily(sample_inputs),
            config_cls=config_cls,
            on_load=self._check_signature,
            **record,
        )
        self._add(implementation, replace)

    def add_config_table(self, path: str | os.PathLike[str]) -> None:
        """Add a shipped table of tuned configs: a JSON file of the persistent cache's schema."""
        with self._lock:
            path = Path(path)
            if path not in self._config_tables:
                self._config_tables.append(path)

    def _prepare(
        self, algorithm: str, platform: Any, backend: Any, priority: int, **rest: Any
    ) -> dict[str, Any]:
        if not isinstance(algorithm, str) or not algorithm.strip():
            raise ValueError(f"algorithm={algorithm!r}: expected a name")
        p, b = parse_platform(platform), parse_backend(backend)
        if p is None:
            raise ValueError(
                f"platform={platform!r}: an implementation belongs to one platform, expected one "
                f"of {', '.join(x.value for x in Platform)}"
            )
        if b not in LEGAL_BACKENDS[p]:
            legal = ", ".join(x.value for x in LEGAL_BACKENDS[p])
            raise ValueError(
                f"backend={backend!r} is not one that platform {p.value!r} runs on: "
                f"expected one of {legal}"
            )
        return dict(algorithm=_key(algorithm), platform=p, backend=b, priority=priority, **rest)

    def _add(self, implementation: Implementation, replace: bool) -> None:
        with self._lock:
            known = self._by_algorithm.get(implementation.algorithm, [])
            same = [i for i in known if i.name == implementation.name]
            if same and not replace:
                raise ValueError(
                    f"{implementation.name} is registered already; pass replace=True to replace it"
                )
            others = [i for i in known if i not in same]
            if implementation.loaded:
                self._check_signature(implementation, others)
            object.__setattr__(implementation, "order", self._count)
            self._count += 1
            self._by_algorithm[implementation.algorithm] = [*others, implementation]

    def _check_signature(
        self, implementation: Implementation, others: Sequence[Implementation] | None = None
    ) -> None:
        signature = signature_of(_callable(implementation), implementation.name)
        with self._lock:
            if others is None:
                others = self._by_algorithm.get(implementation.algorithm, [])
            others = [i for i in others if i.loaded and i is not implementation]
        if others:
            reference = signature_of(_callable(others[0]), others[0].name)
            different = hard_differences(reference, signature)
            if different:
                raise ValueError(
                    f"{implementation.name} differs from {others[0].name}: {'; '.join(different)}"
                )

    # Loading of installed packages

    def installed(self) -> tuple[str, ...]:
        """Platforms for which a kernel package is installed. Imports nothing."""
        return tuple(dict.fromkeys(point.name for point in self._points()))

    def _points(self) -> Sequence[EntryPoint]:
        return self._discover() if self._discover is not None else ()

    def load(self, platforms: Sequence[Platform] = tuple(Platform)) -> None:
        """Load the installed packages of ``platforms`` that are not loaded yet.

        A package that fails is left out as a whole, with one warning; ``failure`` keeps the cause.
        """
        if self._discover is None:
            return
        wanted = {p.value for p in platforms}
        every = {p.value for p in Platform}
        for point in self._points():
            identity = (point.name, point.value)
            # A name that is no platform says nothing about its content: it may always be needed.
            if identity in self._loaded or (point.name in every and point.name not in wanted):
                continue
            with self._lock:
                if identity in self._loaded:
                    continue
                before = {name: list(known) for name, known in self._by_algorithm.items()}
                try:
                    point.load()(self)
                except Exception as error:
                    self._by_algorithm = before
                    self._failures[point.name] = error
                finally:
                    self._loaded.add(identity)

    def failure(self, platform: str | Platform) -> Exception | None:
        """Why the installed package of ``platform`` could not be loaded; None if it could."""
        p = parse_platform(platform)
        return None if p is None else self._failures.get(p.value)

    def _warn_failures(self) -> None:
        for name, error in list(self._failures.items()):
            warn_once(
                ("load", name),
                f"kernel package {name!r} is installed but failed to load, its kernels are not "
                f"used: {type(error).__name__}: {error}",
                stacklevel=5,
            )

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
        """Who can do the call, best first, and why the others cannot. Raises for no such reason.

        Arguments as for ``get``. Only packages that may be needed are loaded, and no kernel.
        """
        forced, wanted = parse_platform(platform), parse_backend(backend)
        target = target_device(device)
        self.load(_platforms_for(target.kind) if forced is None else (forced,))
        if forced is None:
            self._warn_failures()
        return self._survey(_key(algorithm), forced, wanted, inv, target)

    def _survey(
        self,
        algorithm: str,
        forced: Platform | None,
        wanted: Backend | None,
        inv: Any,
        target: TargetDevice,
    ) -> Survey:
        with self._lock:
            known = list(self._by_algorithm.get(algorithm, ()))
        usable, refused = [], []
        for implementation in known:
            if forced is not None and implementation.platform is not forced:
                continue
            reason = _filtered(implementation, wanted) or _misplaced(
                implementation, target, forced is not None
            )
            if reason is None:
                try:
                    reason = implementation.why_not(inv)
                except LazyLoadError as error:
                    reason = str(error)
                    self._warn_lazy(implementation, error)
            if reason is None:
                usable.append(implementation)
            else:
                refused.append((implementation, reason))
        usable.sort(key=lambda i: _rank(i, target))
        refused.sort(key=lambda pair: _rank(pair[0], target))
        return Survey(algorithm, forced, target, tuple(usable), tuple(refused))

    def resolve(
        self,
        algorithm: str,
        platform: str | Platform | None = None,
        backend: str | Backend | None = None,
        *,
        inv: Any = None,
        device: Any = None,
    ) -> Implementation:
        """As ``get``, but the whole record. Its function is loaded."""
        survey = self.survey(algorithm, platform, backend, inv=inv, device=device)
        broken: list[tuple[Implementation, LazyLoadError]] = []
        for implementation in survey.usable:
            try:
                implementation.fn  # noqa: B018 (loads it)
            except LazyLoadError as error:
                broken.append((implementation, error))
                if survey.platform is None:
                    self._warn_lazy(implementation, error)
                continue
            return implementation
        raise self._no_implementation(survey, inv, broken)

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
            inv: the call. With it, implementations whose ``supports`` gives a reason are left out.

        Raises:
            ValueError: unknown platform or backend name.
            KernelNotFound: unknown algorithm, or nothing registered for the platform.
            KernelNotSupported: implementations exist, none can do the call here; says why.
        """
        return self.resolve(algorithm, platform, backend, inv=inv).fn

    def _warn_lazy(self, implementation: Implementation, error: LazyLoadError) -> None:
        warn_once(
            ("lazy", implementation.name),
            f"{implementation.name} is not used: {error}",
            stacklevel=5,
        )

    def _no_implementation(
        self,
        survey: Survey,
        inv: Any,
        broken: Sequence[tuple[Implementation, LazyLoadError]],
    ) -> Exception:
        """The error of a look-up that found nothing, with everything that helps."""
        self.load()
        algorithm, forced, target = survey.algorithm, survey.platform, survey.target
        if algorithm not in self._by_algorithm and not (forced and forced.value in self._failures):
            return self._unknown(algorithm)
        everything = self._survey(algorithm, None, None, inv, target)
        nearest = next(
            (i.platform.value for i in everything.usable if i.platform is not forced), None
        )
        reasons = [(i, reason) for i, reason in survey.refused]
        reasons += [(i, str(error)) for i, error in broken]
        named = dict(
            algorithm=algorithm, platform=forced.value if forced else None, nearest=nearest
        )
        if forced is None:
            if not reasons:
                reasons = list(everything.refused)
            text = "; ".join(f"{i.platform.value}/{i.backend.value}: {r}" for i, r in reasons)
            argument = _argument(reasons[0]) if len(reasons) == 1 else None
            return KernelNotSupported(reason=text, argument=argument, **named)
        failure = self._failures.get(forced.value)
        if failure is not None and not reasons:
            error = KernelUnavailable(
                reason=f"its package is installed but failed to load: {failure}",
                argument="platform",
                **named,
            )
            error.__cause__ = failure
            return error
        if not reasons:
            return self._not_registered(survey, named)
        text = "; ".join(dict.fromkeys(reason for _, reason in reasons))
        misplaced = all(_misplaced(i, target, True) for i, _ in reasons)
        argument = "platform" if misplaced else _argument(reasons[0])
        error = KernelNotSupported(reason=text, argument=argument, **named)
        if broken:
            error.__cause__ = broken[0][1]
        return error

    def _unknown(self, algorithm: str) -> KernelNotFound:
        known = ", ".join(sorted(self._by_algorithm)) or "none"
        return KernelNotFound(
            f"algorithm {algorithm!r} is unknown: registered are {known}; installed kernel "
            f"packages: {discovery.describe_installed(self._points())}; "
            f"more come with: {discovery.install_line()}"
        )

    def _not_registered(self, survey: Survey, named: dict[str, Any]) -> Exception:
        forced, target = survey.platform, survey.target
        assert forced is not None
        elsewhere = ", ".join(i.name for i in self._by_algorithm[survey.algorithm])
        text = (
            f"{survey.algorithm} has no implementation on platform {forced.value!r}: registered "
            f"are {elsewhere}; installed kernel packages: "
            f"{discovery.describe_installed(self._points())}; "
            f"more may come with: {discovery.install_line(forced)}"
        )
        needs = LEGAL_BACKENDS[forced]
        if Backend.ANY in needs or target.kind in needs:
            return KernelNotFound(text)
        device = " or ".join(x.value for x in needs)
        reason = f"platform {forced.value!r} needs a {device}, the target device is {target.name!r}"
        return KernelUnavailable(
            f"{text}; besides, {reason}", reason=reason, argument="platform", **named
        )

    # Inspection

    @property
    def config_tables(self) -> tuple[Path, ...]:
        """Paths given to ``add_config_table`` by the packages loaded so far."""
        with self._lock:
            return tuple(self._config_tables)

    def list_algorithms(self) -> list[str]:
        """Names of all algorithms, sorted. Loads every installed package, no kernel."""
        self.load()
        self._warn_failures()
        with self._lock:
            return sorted(self._by_algorithm)

    def list_implementations(self, algorithm: str) -> list[Implementation]:
        """All implementations of an algorithm, highest priority first; empty when unknown."""
        self.load()
        self._warn_failures()
        with self._lock:
            known = self._by_algorithm.get(_key(algorithm), [])
            return sorted(known, key=lambda i: (-i.priority, i.order))

    def describe(self, algorithm: str | None = None) -> str:
        """A table of what is registered: one line per implementation."""
        names = self.list_algorithms() if algorithm is None else [_key(algorithm)]
        rows = [("algorithm", "platform", "backend", "priority", "gradients", "version")]
        for name in names:
            for i in self.list_implementations(name):
                gradients = "yes" if i.differentiable else "no"
                rows.append(
                    (name, *map(str, (i.platform, i.backend, i.priority, gradients, i.version)))
                )
        if len(rows) == 1:
            return f"nothing registered{'' if algorithm is None else f' for {algorithm!r}'}"
        widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def validate_signatures(self, algorithm: str | None = None) -> list[str]:
        """Differences between the signatures of implementations, one per line; empty = none.

        Compares names, order, kinds, defaults, and annotations where both sides have them, with
        the implementation registered first. Loads every implementation it compares.
        """
        names = self.list_algorithms() if algorithm is None else [_key(algorithm)]
        lines = []
        for name in names:
            reference: tuple[Implementation, inspect.Signature] | None = None
            for i in sorted(self.list_implementations(name), key=lambda i: i.order):
                try:
                    signature = signature_of(_callable(i), i.name)
                except (LazyLoadError, ValueError) as error:
                    lines.append(f"{i.name}: {error}")
                    continue
                if reference is None:
                    reference = (i, signature)
                    continue
                first, expected = reference
                different = hard_differences(expected, signature)
                different += soft_differences(expected, signature)
                lines += [f"{i.name} differs from {first.name}: {d}" for d in different]
        return lines


def _key(algorithm: str) -> str:
    return algorithm.strip().lower()


def _callable(implementation: Implementation) -> Callable[..., Any]:
    """The function, loaded but not checked."""
    fn = implementation.function
    return fn.resolve() if isinstance(fn, LazyFunction) else fn


def _platforms_for(kind: Backend) -> tuple[Platform, ...]:
    """Platforms that may have an implementation for this hardware."""
    return tuple(p for p, b in LEGAL_BACKENDS.items() if kind in b or Backend.ANY in b)


def _filtered(i: Implementation, wanted: Backend | None) -> str | None:
    if wanted in (None, Backend.ANY, i.backend) or i.backend is Backend.ANY:
        return None
    return f"it is for backend {i.backend.value!r}, {wanted.value!r} was asked for"


def _misplaced(i: Implementation, target: TargetDevice, forced: bool) -> str | None:
    """Why the hardware cannot run it, None when it can."""
    if i.platform is Platform.CUDA and not target.is_nvidia:
        return f"it needs an NVIDIA gpu, the target device is {target.name!r} ({target.kind.value})"
    if i.backend in (Backend.ANY, target.kind):
        return None
    if forced and i.platform in INTERPRETABLE and interpreting():
        return None
    reason = f"it needs a {i.backend.value}, the target device is {target.name!r}"
    reason += f" ({target.kind.value})" if target.name != target.kind.value else ""
    if forced and i.platform in INTERPRETABLE:
        reason += "; EJKERNEL_INTERPRET=1 runs it in an interpreter"
    return reason


def _rank(i: Implementation, target: TargetDevice) -> tuple[int, bool, bool, int]:
    native = i.platform is target.native_platform
    # Off its hardware a kernel is interpreted, and of Pallas only TPU kernels can be.
    return (-i.priority, not native, i.backend not in (target.kind, Backend.TPU), i.order)


def _argument(refusal: tuple[Implementation, str]) -> str | None:
    """The parameter a reason is about: the first parameter name that appears in it."""
    implementation, reason = refusal
    if not implementation.loaded:
        return None
    names = [n for n in inspect.signature(_callable(implementation)).parameters if n != "cfg"]
    found = [(at, n) for n in names if (at := _word_at(reason, n)) >= 0]
    return min(found)[1] if found else None


def _word_at(text: str, word: str) -> int:
    import re

    match = re.search(rf"\b{re.escape(word)}\b", text)
    return match.start() if match else -1


kernel_registry = KernelRegistry(discover=discovery.installed)
"""The shared registry: implementations of all installed kernel packages."""
