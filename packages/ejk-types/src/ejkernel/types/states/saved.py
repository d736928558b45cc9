"""States of a device that lie along its tokens, for a backward pass in a program of its own.

The compiler decides over how many devices a sequence is spread, after the forward pass was traced
for arrays of the full sequence. An array of states, one for each device, would have an axis of
unknown size. Instead every token holds a few elements of the state of its device: enough for the
most devices there can be, so that each device finds its state in its own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

AXES = "batch seq heads width"


def saved_array_types(
    states: Iterable[Any], a: Mapping[str, Any], devices: int
) -> list[tuple[str, Any]]:
    """Returns axes and types of arrays that hold states ``[batch, heads, rows, columns]``.

    Empty where they would take more room than keys and values of float32.

    Args:
        states: types of the states of one device.
        a: arguments with ``key`` and ``value``, whose second axis has the tokens of all devices.
        devices: the most there can be.
    """
    tokens, room = a["key"].shape[1], a["key"].shape[3] + a["value"].shape[3]
    if not isinstance(tokens, int) or not tokens:
        return []
    types = []
    for state in states:
        b, heads, *matrix = state.shape
        width = -(-math.prod(matrix) * devices // tokens)
        room -= width
        types.append((AXES, jax.ShapeDtypeStruct((b, tokens, heads, width), state.dtype)))
    return types if room >= 0 else []


def lay_states_along_tokens(
    arrays: Sequence[jax.Array], types: Sequence[Any]
) -> tuple[jax.Array, ...]:
    """Returns arrays of the types; states, whose shapes differ, along the tokens."""
    return tuple(_lay_state(x, kind) for x, kind in zip(arrays, types, strict=True))


def _lay_state(state: jax.Array, kind: Any) -> jax.Array:
    if state.shape == kind.shape:
        return state.astype(kind.dtype)
    b, tokens, heads, width = kind.shape
    flat = state.reshape(b, heads, -1)
    padded = jnp.pad(flat, ((0, 0), (0, 0), (0, tokens * width - flat.shape[2])))
    return jnp.swapaxes(padded.reshape(b, heads, tokens, width), 1, 2).astype(kind.dtype)


def read_states(saved_states: jax.Array, matrix: tuple[int, int]) -> jax.Array:
    """Returns the states ``[batch, heads, *matrix]`` that lie along the tokens of a device."""
    b, tokens, heads, width = saved_states.shape
    flat = jnp.swapaxes(saved_states, 1, 2).reshape(b, heads, tokens * width)
    return flat[..., : math.prod(matrix)].reshape(b, heads, *matrix)
