"""Targets of compilation: architecture, shared memory, multiprocessors."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from dataclasses import dataclass, replace

from ejkernel.kernels.triton import compat

# Shared memory one program may use, bytes (CUDA C++ programming guide, table of technical
# specifications per compute capability: "maximum amount of shared memory per thread block").
_CUDA_SHARED = {
    75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448,
    103: 232448, 120: 101376, 121: 101376,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    Attributes:
        platform: ``"cuda"`` or ``"rocm"``.
        arch: compute capability times ten (``90``) or a gfx name (``"gfx942"``).
        shared_limit: bytes of shared memory one program may use.
        cores: multiprocessors (compute units).
        tensor_maps: whether the launcher can hand TMA descriptors to a kernel.
    """

    platform: str = "cuda"
    arch: int | str = 90
    shared_limit: int = 232448
    cores: int = 132
    tensor_maps: bool = True

    @property
    def hopper(self) -> bool:
        """Compute capability 9.0: asynchronous MMAs, TMA."""
        return self.platform == "cuda" and self.arch == 90

    @property
    def warp_size(self) -> int:
        return 64 if self.platform == "rocm" and str(self.arch).startswith("gfx9") else 32

    @property
    def name(self) -> str:
        return f"sm_{self.arch}" if self.platform == "cuda" else str(self.arch)


def cuda_target(capability: int, cores: int = 132) -> Target:
    """Returns the target of a compute capability, e.g. ``cuda_target(80)``."""
    shared = _CUDA_SHARED.get(capability, 101376)
    return Target("cuda", capability, shared, cores)


def ptx_level(target: Target) -> int:
    """Returns the capability (80 or 89) whose PTX conversions may be used, 0 for none."""
    if target.platform != "cuda":
        return 0
    return 89 if int(target.arch) >= 89 else 80


def rocm_target(arch: str, cores: int = 304) -> Target:
    """Returns the target of an AMD architecture, e.g. ``rocm_target("gfx942")``."""
    return Target("rocm", arch, 163840 if arch == "gfx950" else 65536, cores)


def too_old_reason(target: Target) -> str | None:
    """Returns why no kernel here runs on ``target``, None if they do.

    Matrix instructions for bfloat16 and asynchronous copies came with compute capability 8.0.
    """
    if target.platform == "cuda" and int(target.arch) < 80:
        major, minor = divmod(int(target.arch), 10)
        return f"the device has compute capability {major}.{minor}; 8.0 or newer is needed"
    return None


_override: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def compile_for(target: Target):
    """Compiles kernels lowered inside for ``target``, whatever device is present."""
    token = _override.set(target)
    try:
        yield target
    finally:
        _override.reset(token)


@functools.cache
def _first_gpu() -> Target | None:
    import jax

    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return None
    cores = getattr(device, "core_count", 132)
    capability = getattr(device, "compute_capability", None)
    text = str(capability)
    if text.startswith("gfx"):
        return rocm_target(text.split(":")[0], cores)
    target = cuda_target(int(text.replace(".", "")), cores)
    return replace(target, tensor_maps=compat.has_tensor_maps())


def current_target() -> Target:
    """Returns the GPU that kernels are compiled for.

    Inside ``compile_for`` its target, else the first GPU of this process, else a Hopper GPU.
    ``EJKERNEL_TRITON_SMEM_LIMIT`` (bytes) lowers the shared memory a configuration may need.

    Raises:
        ValueError: ``EJKERNEL_TRITON_SMEM_LIMIT`` is not a positive integer.
    """
    target = _override.get() or _first_gpu() or Target()
    text = os.environ.get("EJKERNEL_TRITON_SMEM_LIMIT", "")
    if not text:
        return target
    if not text.isdigit() or int(text) == 0:
        raise ValueError(
            f"EJKERNEL_TRITON_SMEM_LIMIT={text!r}: expected a positive number of bytes"
        )
    return replace(target, shared_limit=min(target.shared_limit, int(text)))
