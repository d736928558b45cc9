"""Sending arrays between the devices of mesh axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Axes = str | tuple[str, ...]
Route = tuple[tuple[int, int], ...]
"""(source, target) of every transfer, by the indices of the devices."""


def permute(tree: Any, axes: Axes, route: Sequence[tuple[int, int]]) -> Any:
    """Returns the arrays that reach this device, zeros where none does."""
    return jax.tree.map(partial(_permute, axes, tuple(route)), tree)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _permute(axes: Axes, route: Route, x: jax.Array) -> jax.Array:
    def send(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, axes, route)

    def send_bits(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
        return jax.lax.bitcast_convert_type(send(bits), x.dtype)

    if x.dtype != jnp.bfloat16:
        return send(x)
    # on CPUs XLA sends bfloat16 as float32, in arrays of their own on both sides
    return jax.lax.platform_dependent(x, cpu=send_bits, default=send)


@_permute.defjvp
def _permute_jvp(axes: Axes, route: Route, primals: Any, tangents: Any) -> Any:
    """Sends the tangent as it is: bits have no gradient."""
    (x,), (dx,) = primals, tangents
    return _permute(axes, route, x), jax.lax.ppermute(dx, axes, route)


Arrays = tuple[jax.Array, ...]


def gather(arrays: Sequence[jax.Array], axes: Axes) -> list[list[jax.Array]]:
    """Returns each array of all devices, in their order, by one all-gather of all of them."""
    return [
        [jax.lax.index_in_dim(x, i, keepdims=False) for i in range(x.shape[0])]
        for x in _gather(axes, tuple(arrays))
    ]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gather(axes: Axes, arrays: Arrays) -> Arrays:
    """Returns the arrays with an axis of devices in front."""

    def gather_each(*arrays: jax.Array) -> Arrays:
        return tuple(jax.lax.all_gather(x, axes) for x in arrays)

    # XLA for GPUs joins the gathers of small arrays; on CPUs it does not, and sends bfloat16 as
    # float32
    return jax.lax.platform_dependent(*arrays, cpu=partial(_gather_bits, axes), default=gather_each)


def _gather_bits(axes: Axes, *arrays: jax.Array) -> Arrays:
    """Gathers the arrays one after the other in one array, as bits of the narrowest of them."""
    everywhere = jax.lax.all_gather(_joined_bits(arrays), axes)
    return _split_bits(everywhere, arrays)


def _joined_bits(arrays: Sequence[jax.Array]) -> jax.Array:
    width = min(np.dtype(x.dtype).itemsize for x in arrays)
    bits = [jax.lax.bitcast_convert_type(x, f"uint{8 * width}").reshape(-1) for x in arrays]
    return jnp.concatenate(bits)


def _split_bits(bits: jax.Array, like: Sequence[jax.Array]) -> Arrays:
    """Returns the arrays of ``[..., bits]``, each with the leading axes in front."""
    width, front = np.dtype(bits.dtype).itemsize, bits.shape[:-1]
    words = [np.dtype(x.dtype).itemsize // width for x in like]
    ends = list(itertools.accumulate(x.size * n for x, n in zip(like, words, strict=True)))
    arrays = []
    for x, n, first, end in zip(like, words, [0, *ends], ends, strict=False):
        part = bits[..., first:end].reshape(*front, *x.shape, *([n] if n > 1 else []))
        arrays.append(jax.lax.bitcast_convert_type(part, x.dtype))
    return tuple(arrays)


def permute_joined(
    arrays: Sequence[jax.Array], axes: Axes, route: Sequence[tuple[int, int]]
) -> Any:
    """Returns what ``permute`` does, by one transfer of the bits of all arrays."""
    return _permute_joined(axes, tuple(route), tuple(arrays))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _permute_joined(axes: Axes, route: Route, arrays: Arrays) -> Arrays:
    return _split_bits(jax.lax.ppermute(_joined_bits(arrays), axes, route), arrays)


@_permute_joined.defjvp
def _permute_joined_jvp(axes: Axes, route: Route, primals: Any, tangents: Any) -> Any:
    """Sends the tangents as they are: bits have no gradient."""
    (arrays,), (dots,) = primals, tangents
    sent = tuple(jax.lax.ppermute(x, axes, route) for x in dots)
    return _permute_joined(axes, route, arrays), sent


@_gather.defjvp
def _gather_jvp(axes: Axes, primals: Any, tangents: Any) -> Any:
    """Gathers the tangents as they are: bits have no gradient."""
    (arrays,), (dots,) = primals, tangents
    return _gather(axes, arrays), tuple(jax.lax.all_gather(x, axes) for x in dots)
