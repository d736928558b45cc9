"""Contexts in which calls are for a device that need not be here."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

H200 = AbstractDevice("NVIDIA H200", 132, "gpu")
# a GPU of few multiprocessors, for what watches every access of its kernels
SMALL_CORES = 3
SMALL_H200 = AbstractDevice("NVIDIA H200", SMALL_CORES, "gpu")


def on(device: Any) -> Any:
    """Returns a context in which ``device``, an AbstractDevice, is the target."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


def described(kind: str, platform: str, cores: int | None = None) -> Any:
    """Returns a context in which the described device is the target."""
    return on(AbstractDevice(kind, cores, platform))


def assert_no_races() -> None:
    """Checks what TPU's interpreter saw since it was last reset; nothing where it has not run."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator

    assert simulator.races is None or not simulator.races.races_found
