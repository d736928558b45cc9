"""Installed kernel packages: entry points of the group ``ejkernel.kernels``.

The name of an entry point is a platform, its value a ``register(registry)`` function. Listing
names imports nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from ejkernel.ops.platforms import Platform

GROUP = "ejkernel.kernels"

_INSTALL = {
    Platform.XLA: "pip install ejk-kernels-xla",
    Platform.CUDA: "pip install ejk-kernels-xla",
    Platform.TRITON: "pip install ejk-kernels-triton",
    Platform.PALLAS: "pip install ejk-kernels-pallas",
}

# Packages load in this order, so that registration order never depends on who asked first.
_ORDER = {name: i for i, name in enumerate(("triton", "pallas", "cuda", "xla"))}


@functools.cache
def installed() -> tuple[EntryPoint, ...]:
    """The entry points of all installed kernel packages, each once, in loading order."""
    found = {(e.name, e.value): e for e in entry_points(group=GROUP)}
    return tuple(sorted(found.values(), key=lambda e: (_ORDER.get(e.name, 9), e.name, e.value)))


def describe_installed(points: Iterable[EntryPoint]) -> str:
    """Installed kernel packages for a message, e.g. "cuda (ejk-kernels-xla 0.1.0)"."""
    names = []
    for point in points:
        dist = point.dist
        names.append(f"{point.name} ({dist.name} {dist.version})" if dist else point.name)
    return ", ".join(names) or "none"


def install_line(platform: Platform | None = None) -> str:
    """The pip command that brings implementations of ``platform``, or of everything."""
    return "pip install ejk-modules" if platform is None else _INSTALL[platform]
