"""Unit lower triangular systems, by substitution over blocks.

    (I + N) x = r        N strictly lower triangular [..., c, c], r [..., c, n]

Diagonal blocks of 16 rows are inverted by halving, then rows are substituted block by block, in
matmuls only. The entries of the inverse are at most 2 where the recurrence is stable, but how it is
computed matters. Relative error of the output (512 tokens, no decay, beta 2, chunks of 64):

    keys                                      all equal        nearly equal
    beta larger by one rounding               5e-5             1e-5
    substitution row by row                   1e-6 to 1e-4     4e-6 to 2e-5
    substitution by blocks of 16 rows         1e-6 to 2e-4     1e-5 to 2e-5
    inverse of all 64 rows by halving         1e-6 to 4e-4     2e-5 to 4e-5
    (I - N)(I + N^2)(I + N^4)...              overflow         overflow

The powers of N have entries up to 1e18, also for beta 1. The error of both substitutions is that of
rounding ``beta k k^T``, which any computation in chunks has.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla.linear_attention.chunk import join_blocks, lower_quarters

BLOCK = 16

# TF32 or bfloat16 makes keys of length 1 longer than 1: with beta 2 the state then grows
PRECISION = jax.lax.Precision.HIGHEST
matmul = partial(jnp.matmul, precision=PRECISION)


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _diagonal_inverses(n: jax.Array, size: int) -> jax.Array:
    """Returns the inverses of the diagonal blocks of ``I + n``: ``[..., c / size, size, size]``."""
    count = n.shape[-1] // size
    blocks = n.reshape(*n.shape[:-2], count, size, count, size)
    blocks = jnp.einsum("...iaib->...iab", blocks)
    inverse = jnp.ones_like(blocks[..., 0])[..., None, None]
    m = 1
    while m < size:
        below = lower_quarters(blocks, m)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = join_blocks(inverse, -matmul(second, matmul(below, first)), 0)
        m *= 2
    return inverse[..., 0, :, :]


def _substitute(n: jax.Array, inverses: jax.Array, r: jax.Array, *, transpose: bool) -> jax.Array:
    """Returns the solution of ``(I + n) x = r``, or of ``(I + n)^T x = r``."""
    if transpose:
        n, inverses = _transposed(n), _transposed(inverses)
    count, size = inverses.shape[-3], inverses.shape[-1]
    parts: list[jax.Array] = []  # the solved blocks, in the order of their rows
    for i in reversed(range(count)) if transpose else range(count):
        rows = slice(i * size, (i + 1) * size)
        solved = slice((i + 1) * size, None) if transpose else slice(0, i * size)
        part = r[..., rows, :]
        if parts:
            part = part - matmul(n[..., rows, solved], jnp.concatenate(parts, axis=-2))
        part = matmul(inverses[..., i, :, :], part)
        parts = [part, *parts] if transpose else [*parts, part]
    return jnp.concatenate(parts, axis=-2)


@jax.custom_vjp
def solve(n: jax.Array, r: jax.Array) -> jax.Array:
    """Returns the solution x of ``(I + n) x = r``; only entries below the diagonal are read."""
    return _forward(n, r)[0]


def _forward(n: jax.Array, r: jax.Array):
    inverses = _diagonal_inverses(n, min(BLOCK, n.shape[-1]))
    x = _substitute(n, inverses, r, transpose=False)
    return x, (n, inverses, x)


def _backward(saved, dx):
    n, inverses, x = saved
    dr = _substitute(n, inverses, dx, transpose=True)
    return jnp.tril(-matmul(dr, _transposed(x)), -1), dr


solve.defvjp(_forward, _backward)
