"""The short causal convolution over tokens on several devices.

A device needs the last inputs before its own, one less than the convolution has taps. They are the
state of the sequence that enters, and the kernel takes it as any other initial state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype
from ejkernel.types.states.line import Line, LocalSequences, expand_flags


def convolve_over_devices(
    a: Mapping[str, Any], line: Line, run: Callable[[dict[str, Any]], Any]
) -> tuple[jax.Array, ...]:
    """Returns the output, and the last states if the call requests them.

    ``a``: the arguments of one device; ``run``: computes a call of one device.
    """
    x, cu, initial = a["x"], a["cu_seqlens"], a["initial_state"]
    s, history = LocalSequences.of_line(line, cu), a["weight"].shape[1] - 1
    states = x.shape[0] if cu is None else cu.shape[0] - 1
    dtype = x.dtype if initial is None else result_dtype(x, initial)
    if initial is None:
        initial = jnp.zeros((states, x.shape[2], history), dtype)
    initial = initial.astype(dtype)
    entering = _state_before(line, x.astype(dtype), initial, cu)
    state = jnp.where(expand_flags(s.enters, initial), entering, initial)
    local = {**a, "initial_state": state, "cu_seqlens": s.cu_seqlens, "return_state": True}
    y, final = run(local)
    return (y, s.last_states(final)) if a["return_state"] else (y,)


def _state_before(line: Line, x: jax.Array, initial: jax.Array, cu: Any) -> jax.Array:
    """Returns the last inputs before this device's tokens, were each sequence one that enters.

    Before a sequence there are the inputs of its initial state.
    """
    history = initial.shape[2]
    tail = x[:, -history:]  # all tokens of this device, where it has fewer
    tokens = min(history, line.length)
    hops = min(-(-history // tokens), line.size - 1)
    parts = [line.receive(tail, places) for places in range(hops, 0, -1)]
    before = jnp.concatenate(parts, axis=1)[:, -history:]
    missing = history - before.shape[1]
    before = jnp.swapaxes(jnp.pad(before, ((0, 0), (missing, 0), (0, 0))), 1, 2)
    # entry j stands for this token of the whole sequence
    token = line.offset - history + jnp.arange(history, dtype=jnp.int32)
    start = jnp.zeros((1, 1), jnp.int32) if cu is None else cu[:-1, None]
    behind = (token - start)[:, None]  # tokens of the sequence before it
    index = jnp.broadcast_to(jnp.clip(history + behind, 0, history - 1), initial.shape)
    return jnp.where(behind >= 0, before, jnp.take_along_axis(initial, index, axis=2))
