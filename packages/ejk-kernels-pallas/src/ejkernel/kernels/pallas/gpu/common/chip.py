"""The GPU a kernel is made for."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.pallas import compat
from ejkernel.ops.utils.device import target_device
from ejkernel.types.masks.structure import Unsupported

# Shared memory of a Hopper block, bytes (CUDA C++ programming guide, compute capability 9.0).
SHARED = 232448
BARRIERS = 512  # bytes of it that a kernel keeps for barriers and alignment


@dataclass(frozen=True)
class Chip:
    """Properties of the GPU that tiles depend on.

    Attributes:
        cores: multiprocessors.
        shared: bytes of shared memory of a program.
        cache: bytes of L2 that one half of the chip reads at full speed.
    """

    cores: int = 132
    shared: int = SHARED
    cache: int = 25 * 2**20


def current_chip() -> Chip:
    """The GPU JAX targets here.

    Raises:
        Unsupported: it is not a Hopper GPU, or JAX has no Mosaic GPU.
    """
    problem = compat.mosaic_gpu_problem()
    if problem is not None:
        raise Unsupported(problem)
    device = target_device()
    if device.capability != "9.0":
        device_text = f"{device.name}" + (f" ({device.capability})" if device.capability else "")
        raise Unsupported(
            f"the device is {device_text}; these kernels need a Hopper GPU (compute capability 9.0)"
        )
    return Chip(cores=device.cores or 132)
