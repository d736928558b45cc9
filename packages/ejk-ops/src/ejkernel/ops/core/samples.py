"""Synthetic inputs for tuning."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.keys import is_array

# Random values drawn before they repeat: cheap to draw, and a prime, so that no two tiles or pages
# are equal.
DRAWN = 1_000_003


class QuickGenerator(np.random.Generator):
    """A generator whose large normal arrays repeat: a cache of gigabytes in a second."""

    def standard_normal(self, size: Any = None, dtype: Any = np.float32, out: Any = None) -> Any:
        """Draws as ``Generator.standard_normal`` does; float32 by default."""
        count = 0 if size is None else int(np.prod(size))
        if count <= DRAWN or out is not None:
            return super().standard_normal(size, dtype, out)
        return np.resize(super().standard_normal(DRAWN, dtype), count).reshape(size)


def sample_generator() -> np.random.Generator:
    """The generator of synthetic inputs."""
    return QuickGenerator(np.random.PCG64(0))


def random_array(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    """Uniform in [0.1, 1) for floats, True for bools, zero for integers, a key for PRNG keys.

    Small positive values lie in the domain of roots, logarithms and quotients.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.random.key(0)
        return key if not shape else jnp.broadcast_to(key, shape)
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.zeros(shape, dtype)
    size = int(np.prod(shape))
    drawn = rng.uniform(0.1, 1.0, min(max(size, 1), DRAWN)).astype(np.float32)
    return np.resize(drawn, size).reshape(shape).astype(dtype)


def random_like(tree: Any, rng: np.random.Generator) -> Any:
    """``tree`` with every array or ShapeDtypeStruct replaced by a random one."""
    return jax.tree_util.tree_map(
        lambda x: random_array(tuple(x.shape), x.dtype, rng) if is_array(x) else x, tree
    )
