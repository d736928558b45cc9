"""Installed kernel packages: entry points of the group ``ejkernel.kernels``.

The name of an entry point is a platform, its value a ``register(registry)`` function. Listing
names imports nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ejkernel.ops.errors import warn_once
from ejkernel.ops.platforms import Platform
from ejkernel.ops.utils.copying import Copyable

GROUP = "ejkernel.kernels"

_INSTALL = {
    Platform.XLA: "pip install ejk-kernels-xla",
    Platform.CUDA: "pip install ejk-kernels-xla",
    Platform.TRITON: "pip install ejk-kernels-triton",
    Platform.PALLAS: "pip install ejk-kernels-pallas",
}

_PLATFORMS = frozenset(p.value for p in Platform)
# Packages load in this order, so that registration order never depends on the first look-up.
_ORDER = {name: i for i, name in enumerate(("triton", "pallas", "cuda", "xla"))}


@functools.cache
def installed() -> tuple[EntryPoint, ...]:
    """The entry points of all installed kernel packages, each once, in loading order."""
    points = {(e.name, e.value): e for e in entry_points(group=GROUP)}

    def order(e: EntryPoint) -> tuple[Any, ...]:
        # ours first: a package that replaces one of our kernels expects it to be registered
        return _ORDER.get(e.name, 9), e.name, not e.value.startswith("ejkernel."), e.value

    return tuple(sorted(points.values(), key=order))


def install_line(platform: Platform | None = None) -> str:
    """Returns the pip command that installs implementations of ``platform``, or of all."""
    return "pip install ejk-modules" if platform is None else _INSTALL[platform]


class Packages(Copyable):
    """The kernel packages of one registry: each is loaded once, when it is first needed."""

    def __init__(self, discover: Callable[[], Sequence[EntryPoint]]):
        self.points = discover
        self._lock = threading.RLock()
        self._loaded: set[tuple[str, str]] = set()
        self._failures: dict[tuple[str, str], tuple[EntryPoint, Exception]] = {}

    def names(self) -> tuple[str, ...]:
        """Platforms that have a package. Imports nothing."""
        return tuple(dict.fromkeys(point.name for point in self.points()))

    def describe(self) -> str:
        """Returns the installed packages for a message, e.g. "xla (ejk-kernels-xla 0.1.0)"."""
        words = []
        for point in self.points():
            failed = ", failed to load" if (point.name, point.value) in self._failures else ""
            words.append(f"{point.name} ({whose(point)}){failed}")
        return ", ".join(words) or "none"

    def load(self, platforms: Sequence[Platform], use: Callable[[EntryPoint], None]) -> None:
        """Call ``use`` for each package of ``platforms`` that was not used yet; keep failures."""
        requested = {p.value for p in platforms}
        for point in self.points():
            identity = (point.name, point.value)
            if identity in self._loaded:
                continue
            # A package whose name is no platform may always be needed.
            if point.name in _PLATFORMS and point.name not in requested:
                continue
            with self._lock:
                if identity in self._loaded:
                    continue
                try:
                    use(point)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # also SystemExit, which an import may raise
                    self._failures[identity] = point, _as_failure(error)
                finally:
                    self._loaded.add(identity)

    def failures(self) -> list[tuple[EntryPoint, Exception]]:
        """The packages that could not be loaded, each with the cause."""
        return list(self._failures.values())

    def failure(self, platform: Platform | None) -> Exception | None:
        """Returns why a package of ``platform`` could not be loaded; None without a failure."""
        errors = (e for point, e in self.failures() if platform and point.name == platform.value)
        return next(errors, None)

    def warn_failures(self) -> None:
        """Warn, once each, about packages that failed to load."""
        for point, error in self.failures():
            warn_once(
                ("load", point.name, point.value),
                f"kernel package {point.name!r} ({whose(point)}) is installed but failed to "
                f"load, its kernels are not used: {type(error).__name__}: {error}",
                stacklevel=6,
            )


def whose(point: EntryPoint) -> str:
    """Returns the distribution of an entry point with its version; without one, its value."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _as_failure(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    failure = ImportError(f"it ends the process when it is loaded: {error!r}")
    failure.__cause__ = error
    return failure
