"""Versions of JAX, jax-triton and Triton that work together, and the differences between them.

Everything here is looked at on first use of a kernel; importing this module imports neither
triton nor jax_triton.

jax-triton ships the custom call that launches a compiled kernel, in two forms:

============  =======================  ===========  =====================  ============
jax-triton    custom call              api version  host TMA descriptors   for Python
============  =======================  ===========  =====================  ============
0.3.1         triton_kernel_call       2            no                     3.11
0.4.1 ...     triton_kernel_call_ffi   4            yes                    >= 3.12
============  =======================  ===========  =====================  ============
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from dataclasses import dataclass
from typing import Any

# Triton 3.4.0 to 3.7.0 feed the transpose of a Hopper MMA accumulator to the next MMA
# incorrectly; gradients of chunked kernels come out wrong without any error.
_OLDEST_TRITON = (3, 7, 1)
WORKS = (
    "combinations that work: Python 3.11 with jax 0.10.x, jax-triton 0.3.1, triton>=3.7.1; "
    "Python >=3.12 with jax 0.11 or newer, jax-triton>=0.4.1, triton>=3.7.1; "
    "in both cases with JAX's CUDA or ROCm plugin of the same version as jax"
)


class IncompatibleVersions(ImportError):
    """The installed JAX, jax-triton and Triton cannot be used together."""


@dataclass(frozen=True)
class Toolchain:
    """Interface of the installed versions for handing a compiled kernel to XLA."""

    native: Any  # jaxlib's module that serialises launches
    call_target: str
    api_version: int
    tensor_maps: bool  # TMA descriptors built by the host are understood
    triton_version: str


def version_tuple(text: str) -> tuple[int, ...]:
    """Leading integers of a version, e.g. ``"3.9.0+git"`` -> ``(3, 9, 0)``."""
    leading = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in leading[0].split(".")) if leading else ()


def installed(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def unavailable_reason() -> str | None:
    """Returns why the installed packages cannot run Triton kernels, None if they can.

    Reads package metadata only, so it is cheap and imports nothing.
    """
    triton, bridge = installed("triton"), installed("jax-triton")
    if triton is None or bridge is None:
        missing = "triton" if triton is None else "jax-triton"
        return f"{missing} is not installed; {WORKS}"
    if version_tuple(triton) < _OLDEST_TRITON:
        return (
            f"triton {triton} is older than 3.7.1 (3.4.0 to 3.7.0 compute wrong gradients on "
            f"Hopper); {WORKS}"
        )
    if version_tuple(bridge) < (0, 3, 1):
        return f"jax-triton {bridge} is too old; {WORKS}"
    return None


@functools.cache
def toolchain() -> Toolchain:
    """The installed tools.

    Raises:
        IncompatibleVersions: naming what is wrong and a combination that works.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise IncompatibleVersions(reason)
    version = version_tuple(installed("jax-triton") or "")
    native = _native_module()
    if not hasattr(native, "TritonKernelCall"):  # no module, or jaxlib's shell without a plugin
        raise IncompatibleVersions(
            "jaxlib has no GPU plugin here (jax-cuda12-plugin, jax-cuda13-plugin or the ROCm "
            f"one), so Triton kernels cannot be launched; {WORKS}"
        )
    modern = version >= (0, 4)
    return Toolchain(
        native=native,
        call_target="triton_kernel_call_ffi" if modern else "triton_kernel_call",
        api_version=4 if modern else 2,
        tensor_maps=modern and hasattr(native, "create_tma_descriptor_parameter"),
        triton_version=installed("triton") or "",
    )


def has_tensor_maps() -> bool:
    """Returns whether the installed jax-triton can hand TMA descriptors to a kernel."""
    return version_tuple(installed("jax-triton") or "") >= (0, 4)


@functools.cache
def has_gluon() -> bool:
    """Returns whether the installed Triton has the names that kernels in Gluon are written with."""
    return version_tuple(installed("triton") or "") >= (3, 9)


def _native_module() -> Any:
    """jax-triton's handle on jaxlib's launcher; its import must not disturb Triton's cache."""
    # importing jax_triton changes TRITON_CACHE_DIR (0.3.1 empties it, 0.4 removes it)
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton.triton_lib as library
    except ImportError as error:  # 0.3.1 without a GPU plugin
        raise IncompatibleVersions(f"jax-triton cannot be imported: {error}; {WORKS}") from error
    finally:
        if before is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = before
    return library.triton_kernel_call_lib


def result_aval(operands: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a kernel's result: that of its operands inside a shard_map, else plain."""
    from jax.core import ShapedArray
    from jax.sharding import NamedSharding, PartitionSpec

    for aval in operands:
        kind = getattr(aval, "manual_axis_type", None)
        if kind is not None and not kind.empty:
            sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
            return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
    return ShapedArray(shape, dtype)
