"""The description of a kernel package: its kernels, as text, and its public functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ejkernel.ops.utils.device import device_kind

HOOKS = ("supports", "heuristic", "candidates", "sample_inputs", "notes", "priority_for")


def add_tables(registry: Any, module: str) -> None:
    """Registers the tuned tables in the folder of a module."""
    folder = Path(sys.modules[module].__file__ or "").parent / "tables"
    for table in sorted(folder.glob("*.json")):
        registry.add_config_table(table)


@dataclass(frozen=True)
class Entry:
    """One kernel of a package, as text, so that nothing is imported before it is needed.

    Attributes:
        algorithm: its name in the registry.
        target: the kernel, ``"folder.module:NAME"`` inside the package; default: that of the
            algorithm's name in ``implementation`` of the folder of this name.
        backend, priority, config_fields: as in ``KernelRegistry.register``.
        function: name of the public function; default: the algorithm's.
        hooks: names of the kernel's hooks, which are its methods.
    """

    algorithm: str
    target: str = ""
    backend: str = "gpu"
    priority: int = 100
    function: str = ""
    hooks: tuple[str, ...] = HOOKS[:-1]
    config_fields: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.target:
            name = self.algorithm
            object.__setattr__(self, "target", f"{name}.implementation:{name}")

    @property
    def public(self) -> str:
        return self.function or self.algorithm


class KernelPackage:
    """A package's kernels: registers them, and makes each a function of the package's module.

    Args:
        name: import name of the package.
        platform: what its kernels are written for.
        entries: its kernels.
    """

    def __init__(self, name: str, platform: str, entries: tuple[Entry, ...]):
        self.name, self.platform, self.entries = name, platform, entries

    def path(self, target: str) -> str:
        return f"{self.name}.{target}"

    def hooks(self, entry: Entry) -> dict[str, str]:
        """Keyword arguments of ``register_lazy``."""
        return {hook: f"{self.path(entry.target)}.{hook}" for hook in entry.hooks}

    def register(self, registry: Any) -> None:
        """Register every kernel and the tuned tables of the package; imports none of them."""
        for entry in self.entries:
            registry.register_lazy(
                entry.algorithm,
                self.platform,
                entry.backend,
                entry.priority,
                target=self.path(entry.target),
                config_fields=entry.config_fields,
                **self.hooks(entry),
            )
        add_tables(registry, self.name)

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the public functions."""
        return tuple(dict.fromkeys(entry.public for entry in self.entries))

    def load(self, entry: Entry) -> Callable[..., Any]:
        module, _, name = self.path(entry.target).partition(":")
        return getattr(import_module(module), name)

    def function(self, name: str) -> Callable[..., Any]:
        """The public function of this name; of several devices' kernels, the target device's."""
        by_backend = {entry.backend: entry for entry in self.entries if entry.public == name}
        if len(by_backend) == 1:
            return self.load(*by_backend.values())

        def choose(*args: Any, **kwargs: Any) -> Any:
            kind = device_kind()
            return self.load(by_backend[kind if kind in by_backend else "tpu"])(*args, **kwargs)

        choose.__name__ = choose.__qualname__ = name
        choose.__doc__ = f"{name}, by the kernel of the target device (the TPU's on a CPU)."
        return choose

    def export(self) -> None:
        """Make the public functions attributes of the package's module, loaded on first use."""
        package = self

        class Module(ModuleType):
            """A package's module: many of its functions have the name of one of its folders."""

            def __dir__(self) -> list[str]:
                return sorted({*super().__dir__(), *package.functions})

        for name in self.functions:
            # importing a folder assigns it to the module; the attribute stays the function
            seen = property(lambda _, name=name: self.function(name), lambda _, value: None)
            setattr(Module, name, seen)
        sys.modules[self.name].__class__ = Module
