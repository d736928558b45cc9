"""One readable XLA implementation of every ejkernel operation.

Every operation is a function here, under its own name, with full gradients:
``ejkernel.kernels.xla.flash_attention(q, k, v, causal=True)``. Each is imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from ejkernel.kernels.xla._registrations import REGISTRATIONS
from ejkernel.kernels.xla._version import __version__
from ejkernel.ops.packages import add_tables

__all__ = ["__version__", "register", *(r.function for r in REGISTRATIONS)]


def register(registry: Any) -> None:
    """Register every implementation for any backend at the lowest priority; imports none."""
    for r in REGISTRATIONS:
        registry.register_lazy(
            r.algorithm, "xla", "any", 0, target=r.target, config_fields=r.reads, **r.hooks
        )
    add_tables(registry, __name__)


def _exported(target: str) -> property:
    module, _, name = target.partition(":")
    # importing a subpackage assigns it to this module; the function of that name stays visible
    return property(lambda _: getattr(import_module(module), name), lambda _, value: None)


class _Package(ModuleType):
    """This module, with the public functions as attributes: many share a subpackage's name."""

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


for _r in REGISTRATIONS:
    setattr(_Package, _r.function, _exported(_r.target))
sys.modules[__name__].__class__ = _Package
