"""Contexts in which calls are for a device that need not be here."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any
from unittest import mock

import jax
import numpy as np
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


@contextlib.contextmanager
def interpreted_tpu(params: Any) -> Generator[None]:
    """Context in which kernels for TPUs run in Pallas' interpreter with these ``InterpretParams``.

    Programs are compiled quickly, not well: the interpreter makes long ones.
    """
    from ejkernel.kernels.pallas.tpu.common.chip import interpreter
    from ejkernel.ops import interpret_mode

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with interpret_mode(), interpreter(params), _callbacks_of_numpy():
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def _callbacks_of_numpy() -> Generator[None]:
    """Context in which callbacks get NumPy arrays.

    The interpreter calls back for every load and store, and JAX first makes an array of its own of
    each operand, which takes longer than the callback.
    """
    from jax._src import callback as callbacks

    def call(*args: Any, callback: Any, **_: Any) -> Any:
        return jax.tree.map(np.asarray, callback(*map(np.asarray, args)))

    # a private name: where there is none, tests take longer
    with mock.patch.object(callbacks, "io_callback_impl", call, create=True):
        yield


def assert_no_races() -> None:
    """Checks what TPU's interpreter saw since it was last reset; nothing where it has not run."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator

    assert simulator.races is None or not simulator.races.races_found
