"""Registered implementations by algorithm, and tables of tuned configs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from ejkernel.ops.implementation import (
    Implementation,
    LazyFunction,
    checked_priority,
    hard_differences,
    identify,
    lazily,
    signature_of,
)
from ejkernel.ops.platforms import Backend, Platform
from ejkernel.ops.utils.allowed import allow_in_files
from ejkernel.ops.utils.copying import Copyable

F = TypeVar("F", bound=Callable[..., Any])

package_loading: ContextVar[str] = ContextVar("ejkernel_package_loading", default="")
"""The installed package that is being loaded, as the origin of what it registers."""


class Registrations(Copyable):
    """The part of a registry that packages write to. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_algorithm: dict[str, list[Implementation]] = {}
        self._config_tables: list[Path] = []
        self._count = 0

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
        priority_for: Callable[[Any], int] | None = None,
        notes: Callable[[Any], Sequence[str]] | None = None,
        config_fields: Sequence[str] | None = None,
        replace: bool = False,
    ) -> Callable[[F], F]:
        """Decorator that registers an implementation and returns it unchanged.

        All implementations of an algorithm have the same parameters, ``cfg`` aside: same names,
        order and kinds. Convention for ``priority``: native code 100, other accelerator paths 50,
        XLA 0; ``priority_for`` moves between them from call to call. ``replace`` takes the place
        of a registration for the same algorithm, platform and backend; an installed package that
        does so is named in a warning. The meaning of the other arguments is that of the attributes
        of ``Implementation``.

        Raises:
            ValueError: unknown platform or backend, a backend the platform cannot run on, a
                registration that exists already (unless ``replace``), a priority that is no
                number, or a different signature.
        """
        identity = identify(algorithm, platform, backend)

        def decorate(fn: F) -> F:
            implementation = Implementation(
                *identity,
                priority,
                fn,
                supports=supports,
                heuristic=heuristic,
                candidates=candidates,
                sample_inputs=sample_inputs,
                config_cls=config_cls,
                version=version,
                differentiable=differentiable,
                priority_for=priority_for,
                notes=notes,
                config_fields=config_fields,
            )
            self._add(implementation, replace)
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
        replace: bool = False,
        **options: Any,
    ) -> None:
        """Register the function ``target="package.module:function"`` without importing it.

        The module is imported, and the signature compared with the others, when
        ``Implementation.fn`` is first read. ``supports``, ``heuristic``, ``candidates``,
        ``sample_inputs``, ``priority_for`` and ``notes`` may be such strings too, each imported
        on its first call, so that a package's ``register`` imports nothing::

            registry.register_lazy(
                "flash_attention", "xla", "any",
                target="fast.flash_attention:flash_attention",
                supports="fast.flash_attention:supports",
            )

        A module that cannot be imported makes automatic choice pass on, with one warning; a
        forced platform raises. Options and errors as for ``register``.
        """
        lazy: dict[str, Any] = {name: lazily(value) for name, value in options.items()}
        implementation = Implementation(
            *identify(algorithm, platform, backend),
            priority,
            LazyFunction(target),
            **lazy,
            on_load=self._check_signature,
        )
        self._add(implementation, replace)

    def add_config_table(self, path: str | os.PathLike[str]) -> None:
        """Add a shipped table of tuned configs: a JSON file of the persistent cache's schema."""
        with self._lock:
            path = Path(path)
            if path not in self._config_tables:
                self._config_tables.append(path)

    def _add(self, implementation: Implementation, replace: bool) -> None:
        checked_priority(implementation.priority, implementation.name)
        if implementation.config_cls is not None:
            allow_in_files(implementation.config_cls)
        with self._lock:
            implementations = self._by_algorithm.get(implementation.algorithm, [])
            same = [i for i in implementations if i.name == implementation.name]
            if same and not replace:
                raise ValueError(
                    f"{implementation.name} is registered already; pass replace=True to replace it"
                )
            others = [i for i in implementations if i not in same]
            if implementation.loaded:
                self._check_signature(implementation, others)
            origin = package_loading.get() or f"module {implementation.module}"
            object.__setattr__(implementation, "order", self._count)
            object.__setattr__(implementation, "origin", origin)
            for old in same:  # registered again by the same module: it still replaces the first
                replaces = old.replaces if old.origin == origin else old.origin
                object.__setattr__(implementation, "replaces", replaces)
            self._count += 1
            self._by_algorithm[implementation.algorithm] = [*others, implementation]

    def _check_signature(
        self, implementation: Implementation, others: Sequence[Implementation] | None = None
    ) -> None:
        signature = signature_of(implementation.load(), implementation.name)
        with self._lock:
            if others is None:
                others = self._by_algorithm.get(implementation.algorithm, [])
            others = [i for i in others if i.loaded and i is not implementation]
        if others:
            reference = signature_of(others[0].load(), others[0].name)
            different = hard_differences(reference, signature)
            if different:
                raise ValueError(
                    f"{implementation.name} differs from {others[0].name}: {'; '.join(different)}"
                )

    @property
    def version(self) -> int:
        """Counter of registrations; equal versions hold the same implementations."""
        return self._count

    @property
    def config_tables(self) -> tuple[Path, ...]:
        """Paths given to ``add_config_table`` by the packages loaded so far."""
        with self._lock:
            return tuple(self._config_tables)
