"""NaN that a row reads shows in its results: it never becomes the 0 of a row that sees nothing."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejktest.calls import CALLS, call


def has_nan(x) -> bool:
    return bool(np.isnan(np.asarray(x)).any())


@pytest.mark.parametrize("operation", CALLS)
def test_an_operand_of_nan_shows(operation: str) -> None:
    c, function = call(operation), getattr(modules, operation)
    takes_lse = "return_lse" in inspect.signature(function).parameters
    static = {**c.static, **({"return_lse": True} if takes_lse else {})}
    run = jax.jit(lambda arrays: function(**arrays, **static))
    floats = [n for n, x in c.arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)]
    for name in floats:
        results = run({**c.arrays, name: jnp.full_like(c.arrays[name], jnp.nan)})
        out, *others = jax.tree.leaves(results)
        assert has_nan(out), name
        if takes_lse and name in ("query", "queries", "key", "key_cache", "latent_cache"):
            assert has_nan(others[0]), name


def test_keys_of_given_blocks_show() -> None:
    arrays = {n: jnp.ones((1, 8, 2, 4)) for n in ("query", "key", "value")}
    blocks = jnp.zeros((1, 8, 2, 1), jnp.int32)
    for name, x in arrays.items():
        changed = {**arrays, name: x.at[0, 0].set(jnp.nan)}
        out = modules.native_sparse_attention(**changed, block_indices=blocks, block_size=4)
        assert has_nan(out), name
