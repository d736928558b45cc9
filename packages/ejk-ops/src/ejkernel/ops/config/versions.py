"""The versions that decide whether and how fast a kernel runs."""

from __future__ import annotations

import datetime
import functools
from importlib import metadata

PACKAGES = (
    "jax",
    "jaxlib",
    "triton",
    "jax-triton",
    "ejk-ops",
    "ejk-kernels-xla",
    "ejk-kernels-triton",
    "ejk-kernels-pallas",
)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what decides whether and how fast a kernel runs, by distribution."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def versions_text() -> str:
    """The same in one line."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions().items()))


def today() -> str:
    """The date of a measurement."""
    return datetime.date.today().isoformat()
