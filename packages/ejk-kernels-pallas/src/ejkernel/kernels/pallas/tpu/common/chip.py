"""The TPU a kernel is made for: properties that decide tiles, and whether it is interpreted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from ejkernel.ops.interpret import interpreting
from ejkernel.ops.platforms import Backend
from ejkernel.ops.utils.device import target_device
from ejkernel.types.masks.structure import Unsupported

LANES, SUBLANES = 128, 8  # of a vector register of 32-bit values

# What interpretation runs with, and the chip it stands for: the one with the least memory.
_interpreter: ContextVar[tuple[Any, str]] = ContextVar(
    "ejkernel_tpu_interpreter", default=(True, "TPU v4")
)


@dataclass(frozen=True)
class Chip:
    """Properties of the TPU that tiles depend on.

    Attributes:
        vmem: bytes of vector memory of a core.
        mxu: columns (and rows) of a matrix unit.
        generation: 4 for v4, 5 for v5e and v5p and so on.
        interpret: argument of ``pallas_call``: False on a TPU.
    """

    vmem: int
    mxu: int
    generation: int
    interpret: Any = False

    @property
    def tile_memory(self) -> int:
        """Bytes that tiles may take; the rest is left to what the compiler moves ahead."""
        return self.vmem // 4 * 3

    def vmem_limit(self, needed: int) -> int:
        """Returns the limit of vector memory of a kernel that needs ``needed`` bytes of it.

        Never less than the 16 MiB that a kernel without a limit gets: estimates may be too low.
        """
        return min(self.vmem, max(needed, 16 * 2**20))


@functools.cache
def get_chip(kind: str, cores: int | None = 1) -> Chip:
    """Properties of a chip by JAX's ``device_kind``.

    Raises:
        Unsupported: JAX does not know the chip.
    """
    try:
        with on_chip(kind, cores):
            info = pltpu.get_tpu_info()
    except (ValueError, RuntimeError) as error:
        raise Unsupported(f"query: no properties of the device: {error}") from error
    return Chip(info.vmem_capacity_bytes, info.mxu_column_size, info.generation)


def on_chip(kind: str, cores: int | None = 1) -> Any:
    """Context in which ``kind``, e.g. "TPU v5 lite", is the target device, present or not."""
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


@contextlib.contextmanager
def interpreter(params: Any = True, kind: str = "TPU v4") -> Generator[None]:
    """Within the block, interpreted kernels run with these ``pltpu.InterpretParams``, and with
    the tiles of this chip."""
    token = _interpreter.set((params, kind))
    try:
        yield
    finally:
        _interpreter.reset(token)


def current_chip() -> Chip:
    """The target TPU, or one to interpret where there is none.

    Raises:
        Unsupported: the target is no TPU and interpretation is off, or JAX counts in 64 bits.
    """
    target = target_device()
    if target.kind is Backend.TPU:
        if jax.config.jax_enable_x64:  # ty: ignore[missing-attribute]
            raise Unsupported("jax_enable_x64 is on: TPU kernels cannot hold 64-bit numbers")
        return get_chip(target.name, target.cores)
    if not interpreting():
        raise Unsupported(
            f"these kernels need a TPU, the target device is {target.name!r}; "
            "EJKERNEL_INTERPRET=1 runs them in an interpreter"
        )
    params, kind = _interpreter.get()
    return replace(get_chip(kind), interpret=params)
