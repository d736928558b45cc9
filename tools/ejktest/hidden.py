"""NaN where nobody looks: an operation with it against the same without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.drawn import array


def normal(seed: int, *shape: int) -> jax.Array:
    return array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def check(
    function, arrays: dict, queries, keys=None, *, of_queries=("query",), without_rows=()
) -> None:
    """``function(**arrays)`` with NaN in the marked rows against the same without.

    ``queries`` and ``keys`` bool ``[s]`` mark rows of ``of_queries`` and the cotangent, and of the
    other arrays; ``without_rows`` names those that have no such rows.
    """

    @jax.jit
    def run(arrays, rows):
        o, back = jax.vjp(lambda x: function(**x), arrays)
        do = jax.tree.map(lambda x: jnp.where(over(rows, x), jnp.nan, cotangent(x)), o)
        return o, back(do)[0]

    def cotangent(x):
        return normal(9, *x.shape).astype(x.dtype)

    def over(rows, x):
        return rows.reshape(1, -1, *(1,) * (x.ndim - 2))

    dirty = dict(arrays)
    for name, x in arrays.items():
        rows = queries if name in of_queries else keys
        if name not in without_rows and rows is not None:
            dirty[name] = jnp.where(over(rows, x), jnp.nan, x)
    got, want = run(dirty, queries), run(arrays, np.zeros_like(queries))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.isfinite(x).all() and (x != 0).any() for x in jax.tree.leaves(got))
