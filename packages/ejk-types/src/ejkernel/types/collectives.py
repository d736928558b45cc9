"""Sending arrays between the devices of mesh axes."""

from __future__ import annotations

import itertools
import math
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
    everywhere = jax.lax.all_gather(join_bits(arrays), axes)
    return split_bits(everywhere, arrays)


def join_bits(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns one array of words, which has the arrays one after the other.

    A word is an element where all have one dtype, else an integer as wide as the narrowest.
    """
    if len({x.dtype for x in arrays}) > 1:
        width = min(np.dtype(x.dtype).itemsize for x in arrays)
        arrays = [jax.lax.bitcast_convert_type(x, f"uint{8 * width}") for x in arrays]
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def count_words(arrays: Sequence[jax.Array], word: Any) -> int:
    """Returns how many words of a dtype the arrays have."""
    return sum(x.size * np.dtype(x.dtype).itemsize for x in arrays) // np.dtype(word).itemsize


def rows_of_bits(bits: jax.Array, like: Sequence[jax.Array], rows: slice) -> Arrays:
    """Returns ``rows`` of the second axis of each of the arrays that ``bits`` begins with.

    Rows of an array with one first index are one range in memory. It is taken by one slice, for
    which a compiler may give a kernel an address, and no copy.
    """
    if any(x.shape[0] != 1 for x in like):
        return tuple(x[:, rows] for x in split_bits(bits, like))
    parts, first = [], 0
    for x in like:
        n = np.dtype(x.dtype).itemsize // np.dtype(bits.dtype).itemsize
        part = jax.eval_shape(lambda x: x[:, rows], x)
        start = first + rows.start * math.prod(x.shape[2:]) * n
        parts += split_bits(bits[start : start + part.size * n], [part])
        first += x.size * n
    return tuple(parts)


def split_bits(bits: jax.Array, like: Sequence[jax.Array]) -> Arrays:
    """Returns the arrays that ``[..., words]`` begins with, each with the leading axes in front.

    ``like``: their shapes and dtypes, none narrower than a word.
    """
    width, front = np.dtype(bits.dtype).itemsize, bits.shape[:-1]
    words = [np.dtype(x.dtype).itemsize // width for x in like]
    ends = list(itertools.accumulate(x.size * n for x, n in zip(like, words, strict=True)))
    arrays = []
    for x, n, first, end in zip(like, words, [0, *ends], ends, strict=False):
        part = bits[..., first:end].reshape(*front, *x.shape, *([n] if n > 1 else []))
        arrays.append(jax.lax.bitcast_convert_type(part, x.dtype))
    return tuple(arrays)


@_gather.defjvp
def _gather_jvp(axes: Axes, primals: Any, tangents: Any) -> Any:
    """Gathers the tangents as they are: bits have no gradient."""
    (arrays,), (dots,) = primals, tangents
    return _gather(axes, arrays), tuple(jax.lax.all_gather(x, axes) for x in dots)
