"""The device a call is meant for, and its properties.

The target device is the abstract device of the ambient mesh, else ``jax.default_device``, else
the first local device. Nothing here starts a device before it is asked.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.ops.platforms import NATIVE_PLATFORM, Backend, Platform

_KIND_OF_PLATFORM = {
    "gpu": Backend.GPU,
    "cuda": Backend.GPU,
    "rocm": Backend.GPU,
    "tpu": Backend.TPU,
    "cpu": Backend.CPU,
}

# Compute capability by device name, for devices that are described but not present.
_CAPABILITY_OF_NAME = (
    (r"GB300|B300", "10.3"),
    (r"GB200|B200|B100", "10.0"),
    (r"RTX 50\d\d|RTX PRO .*Blackwell", "12.0"),
    (r"H200|H100|H800|H20\b|GH200", "9.0"),
    (r"L40|L4\b|RTX 40\d\d|RTX 6000 Ada", "8.9"),
    (r"A10\b|A10G|A40|A6000|RTX 30\d\d", "8.6"),
    (r"A100|A800|A30\b", "8.0"),
    (r"\bT4\b", "7.5"),
    (r"V100", "7.0"),
    (r"MI35\d", "gfx950"),
    (r"MI30\d|MI325", "gfx942"),
    (r"MI2\d\d", "gfx90a"),
)


@dataclass(frozen=True)
class TargetDevice:
    """A device as dispatch sees it.

    Attributes:
        kind: GPU, TPU or CPU. Hardware of any other maker counts as CPU: only XLA serves it.
        name: the maker's name of the device, JAX's ``device_kind``.
        capability: "9.0" for NVIDIA, "gfx942" for AMD, None elsewhere or when unknown.
        cores: number of cores, None when unknown.
        device: the device itself, None when it is only described (ahead-of-time compilation).
    """

    kind: Backend
    name: str
    capability: str | None = None
    cores: int | None = None
    device: Any = None

    @property
    def native_platform(self) -> Platform:
        """The platform at home here: triton on GPU, pallas on TPU, xla on CPU."""
        return NATIVE_PLATFORM[self.kind]

    @property
    def is_nvidia(self) -> bool:
        return self.kind is Backend.GPU and not self.is_amd

    @property
    def is_amd(self) -> bool:
        if self.kind is not Backend.GPU:
            return False
        return (self.capability or "").startswith("gfx") or bool(
            re.search(r"AMD|Instinct|Radeon", self.name)
        )

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """(9, 0) on NVIDIA devices of known capability, None elsewhere."""
        match = re.fullmatch(r"(\d+)\.(\d+)", self.capability or "")
        return (int(match[1]), int(match[2])) if match else None

    @property
    def present(self) -> bool:
        """Returns whether calls can be executed and timed on it."""
        return self.device is not None

    @property
    def fingerprint(self) -> str:
        """Kind, device name, and capability or core count: equal on equal devices."""
        detail = self.capability or f"{self.cores or 0}cores"
        return f"{self.kind.value}:{re.sub(r'[^A-Za-z0-9.]+', '-', self.name).lower()}:{detail}"


def _capability_of_name(name: str) -> str | None:
    for pattern, capability in _CAPABILITY_OF_NAME:
        if re.search(pattern, name):
            return capability
    return None


@functools.lru_cache(maxsize=256)
def _describe(device: Any) -> TargetDevice:
    """Properties of a jax.Device."""
    kind = _KIND_OF_PLATFORM.get(device.platform, Backend.CPU)
    capability = None
    cores = None
    if kind is Backend.GPU:
        capability = str(getattr(device, "compute_capability", "") or "") or None
        capability = capability or _capability_of_name(device.device_kind)
        cores = getattr(device, "core_count", None)
    elif kind is Backend.TPU:
        cores = getattr(device, "num_cores", None)
    else:
        cores = os.cpu_count()
    return TargetDevice(kind, device.device_kind, capability, cores, device)


@functools.lru_cache(maxsize=256)
def _describe_abstract(kind: str, platform: str, cores: int | None) -> TargetDevice:
    """Properties of a device known by name only; the local one of that name where there is one."""
    backend = _KIND_OF_PLATFORM.get(platform, Backend.CPU)
    for device in _local_devices(None if backend is not Backend.CPU else "cpu"):
        if device.device_kind == kind:
            return _describe(device)
    capability = _capability_of_name(kind) if backend is Backend.GPU else None
    return TargetDevice(backend, kind, capability, cores)


def _local_devices(backend: str | None) -> list[Any]:
    try:
        return jax.local_devices(backend=backend)
    except RuntimeError:
        return []


def ambient_device() -> Any:
    """Returns the ambient target device: an AbstractDevice, a jax.Device, a platform name or None.

    Cheap and hashable, so that it can serve in a key; ``target_device`` looks up its properties.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    settings: Any = jax.config
    return abstract if abstract is not None else settings.jax_default_device


def target_device(device: Any = None) -> TargetDevice:
    """Properties of ``device``, by default about the target device of a call made here.

    Args:
        device: a TargetDevice, jax.Device, jax.sharding.AbstractDevice, the name of a JAX
            platform ("cpu", "gpu", "cuda", "tpu", ...), or None.

    Raises:
        RuntimeError: a platform name without a device of that platform here.
        TypeError: anything else.
    """
    if device is None:
        device = ambient_device()
    if device is None:
        device = jax.local_devices()[0]
    if isinstance(device, TargetDevice):
        return device
    if isinstance(device, jax.Device):
        return _describe(device)
    if isinstance(device, str):
        return _describe(jax.local_devices(backend=device)[0])
    kind, platform = getattr(device, "device_kind", None), getattr(device, "platform", None)
    if isinstance(kind, str) and isinstance(platform, str):  # abstract, or of a topology
        return _describe_abstract(kind, platform, getattr(device, "num_cores", None))
    raise TypeError(f"device must be a device, a platform name or None, got {device!r}")


def device_kind(device: Any = None) -> str:
    """ "gpu", "tpu" or "cpu": the kind of ``device``, by default of the target device."""
    return target_device(device).kind.value


def get_device_platform(device: Any = None) -> str:
    """The platform at home on the device: "triton" on GPU, "pallas" on TPU, "xla" on CPU."""
    return target_device(device).native_platform.value


def device_fingerprint(device: Any = None) -> str:
    """Returns platform, device name, and compute capability or core count, without drivers.

    Equal in every process on an equal device, e.g. "gpu:nvidia-h200:9.0", "cpu:cpu:2cores".
    """
    return target_device(device).fingerprint
