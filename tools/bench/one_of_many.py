"""The program of one device of several, without the others: collectives have local stand-ins.

What a device computes while it shares a sequence can so be timed on a machine with one device. A
stand-in moves no data between devices and has the shape of the collective that it stands for;
values are wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp


@contextlib.contextmanager
def as_device(rank: int, count: int) -> Generator[None]:
    """Traces what device ``rank`` of ``count`` along any mesh axis runs.

    Mesh axes are those without a meaning where they are asked for; kernels have axes, too.
    """
    axis_index, axis_size = jax.lax.axis_index, jax.lax.axis_size

    def index_of(name: Any) -> Any:
        try:
            return axis_index(name)
        except NameError:
            return jnp.int32(rank)

    def size_of(name: Any) -> Any:
        try:
            return axis_size(name)
        except NameError:
            return count

    def gather(x: Any, _: Any, *, axis: int = 0, tiled: bool = False) -> Any:
        parts = jax.lax.optimization_barrier([x] * count)  # in memory, as gathered ones are
        return jnp.concatenate(parts, axis) if tiled else jnp.stack(parts, axis)

    def exchange(x: Any, _: Any, split: int, concat: int, *, tiled: bool = False) -> Any:
        assert tiled
        return jnp.concatenate(jnp.split(x, count, split), concat)

    replaced = {
        "axis_size": size_of,
        "axis_index": index_of,
        "ppermute": lambda x, *_: jax.lax.optimization_barrier(x),
        "all_gather": gather,
        "all_to_all": exchange,
        "psum_scatter": lambda x, _: x[rank],
        "psum": lambda x, _: x,
        "pmax": lambda x, _: x,
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in replaced.items():
            stack.enter_context(mock.patch.object(jax.lax, name, stand_in))
        yield
