"""The versions that decide whether and how fast a kernel runs."""

from __future__ import annotations

import datetime
import functools
import sys
from importlib import metadata

# distribution -> its module, which knows the version of a checkout that is not installed
PACKAGES = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "triton": "triton",
    "jax-triton": "jax_triton",
    "ejk-ops": "ejkernel.ops",
    "ejk-kernels-xla": "ejkernel.kernels.xla",
    "ejk-kernels-triton": "ejkernel.kernels.triton",
    "ejk-kernels-pallas": "ejkernel.kernels.pallas",
}


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of installed or imported distributions, by name."""
    by_name = {}
    for name, module in PACKAGES.items():
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = getattr(sys.modules.get(module), "__version__", None)
            if version is not None:
                by_name[name] = str(version)
    return by_name


def versions_text() -> str:
    """Returns ``versions()`` in one line."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions().items()))


def today() -> str:
    """The date of a measurement."""
    return datetime.date.today().isoformat()
