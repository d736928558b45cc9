"""The short causal convolution: one multiply-add per tap over the shifted tokens.

    z_t[c] = bias[c] + sum_i weight[c, i] x_{t-w+1+i}[c]        y_t = act(z_t)

Tokens before a sequence come from its state. In a batch the state is concatenated in front of the
tokens. In packed sequences, taps that reach before a sequence are masked, and the contribution of
the state is added to the first w - 1 rows of each sequence. Bound: every input is read and every
output written once, a stream.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.packed import packing
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments


def convolve(padded: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the convolution of ``[b, w - 1 + s, c]`` with ``[c, w]``: ``[b, s, c]``."""
    w = weight.shape[1]
    rows = padded.shape[1] - (w - 1)
    taps = [padded[:, i : i + rows] * weight[None, None, :, i] for i in range(w)]
    return sum(taps[1:], taps[0])


def _convolve_batch(
    x: jax.Array, weight: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the convolution ``[b, s, c]`` and the new states; states are ``[b, w - 1, c]``."""
    padded = jnp.concatenate([state, x], axis=1)
    return convolve(padded, weight), padded[:, x.shape[1] :]


def _convolve_packed(
    x: jax.Array, weight: jax.Array, state: jax.Array, cu_seqlens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the convolution of sequences packed in ``[1, s, c]``, and their new states.

    States are ``[n, w - 1, c]``. The third result says which rows belong to a sequence.
    """
    n, w, length = state.shape[0], weight.shape[1], x.shape[1]
    sequence, start, count = packing(cu_seqlens, length)
    is_valid = sequence < n
    position = jnp.arange(length, dtype=jnp.int32) - start[jnp.minimum(sequence, n - 1)]
    x = jnp.where(is_valid[:, None], x[0], 0)  # padding may hold NaN

    z = jnp.zeros_like(x)
    for back in range(w):
        shifted = x if back == 0 else jnp.pad(x, ((back, 0), (0, 0)))[:length]
        inside = (position >= back)[:, None]
        z = z + jnp.where(inside, shifted, 0) * weight[None, :, w - 1 - back]

    # position p < w - 1 of a sequence reads entries p .. w - 2 of its state
    start, count = start[:, None], count[:, None]
    offset = jnp.arange(w - 1, dtype=jnp.int32)[None]
    first = convolve(jnp.concatenate([state, jnp.zeros_like(state)], axis=1), weight)[:, : w - 1]
    row = jnp.where(offset < count, start + offset, length)
    z = z.at[row].add(first, mode="drop")

    # the new state is the last w - 1 entries of the old state followed by the tokens
    from_state = jnp.take_along_axis(state, jnp.clip(count + offset, 0, w - 2)[..., None], axis=1)
    position = count + offset - (w - 1)
    from_rows = jnp.take(x, start + position, axis=0, mode="clip")
    final = jnp.where((position >= 0)[..., None], from_rows, from_state)
    return z[None], final, is_valid[None, :, None]


class CausalConv1D(XlaKernel):
    """A convolution of 2 to 8 taps over the tokens of each channel, with its state.

    No ``cfg`` field is read. Differentiable to every order.
    """

    by_rows = True

    call = calls.CausalConv1D
    reads = arguments.CONVOLUTION

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        x, weight, bias = arrays["x"], arrays["weight"], arrays.get("bias")
        state, cu = arrays.get("initial_state"), arrays.get("cu_seqlens")
        wide = accumulation_dtype(x, weight)
        shape = self.call.state_shape(work.problem._asdict())
        state = jnp.zeros(shape, wide) if state is None else state.astype(wide)
        if 0 in (*x.shape, *shape):
            return (jnp.zeros_like(x), state.astype(x.dtype)), ()
        inputs = (x.astype(wide), weight.astype(wide), jnp.swapaxes(state, 1, 2))
        is_valid = None
        if cu is None:
            z, final = _convolve_batch(*inputs)
        else:
            z, final, is_valid = _convolve_packed(*inputs, cu)
        if bias is not None:
            z = z + bias.astype(wide)[None, None]
        y = jax.nn.silu(z) if work.problem.activation == "silu" else z
        if is_valid is not None:
            y = jnp.where(is_valid, y, 0)
        return (y.astype(x.dtype), jnp.swapaxes(final, 1, 2).astype(x.dtype)), ()


causal_conv1d = CausalConv1D()
