"""Pallas kernels for ejkernel: Mosaic TPU and Mosaic GPU.

Every operation is a function here, under its own name, with full gradients:
``ejkernel.kernels.pallas.flash_attention(q, k, v, causal=True)``. It runs the kernel of the device
JAX targets. Each is imported on first use; importing this package imports no kernel.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from ejkernel.kernels.pallas._registrations import REGISTRATIONS
from ejkernel.kernels.pallas._version import __version__

__all__ = ["__version__", "register", *dict.fromkeys(r.function for r in REGISTRATIONS)]


def register(registry: Any) -> None:
    """Register every implementation for its device; imports none."""
    for r in REGISTRATIONS:
        registry.register_lazy(
            r.algorithm,
            "pallas",
            r.backend,
            r.priority,
            target=r.target,
            config_fields=r.reads,
            **r.hook_targets,
        )


def _exported(function: str) -> property:
    targets = {r.backend: r.target for r in REGISTRATIONS if r.function == function}

    def load(backend: str) -> Any:
        module, _, name = targets[backend].partition(":")
        return getattr(import_module(module), name)

    def choose(*args: Any, **kwargs: Any) -> Any:
        """The operation, by the kernel of the target device (the TPU's where interpreted)."""
        from ejkernel.ops.utils.device import device_kind

        kind = device_kind()
        return load(kind if kind in targets else "tpu")(*args, **kwargs)

    # importing a subpackage assigns it to this module; the function of that name stays visible
    if len(targets) == 1:
        return property(lambda _: load(*targets), lambda _, value: None)
    choose.__name__ = choose.__qualname__ = function
    return property(lambda _: choose, lambda _, value: None)


class _Package(ModuleType):
    """This module, with the public functions as attributes: many share a subpackage's name."""

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


for _name in dict.fromkeys(r.function for r in REGISTRATIONS):
    setattr(_Package, _name, _exported(_name))
sys.modules[__name__].__class__ = _Package
