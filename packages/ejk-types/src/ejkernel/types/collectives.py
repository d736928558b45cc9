"""Sending arrays from device to device along mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

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
