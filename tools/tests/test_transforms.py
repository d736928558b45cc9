"""The checks of transformations can fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejktest.transforms import check_shard_map, check_transformations

PAIRS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones((2, 3), np.float32)}


@jax.custom_batching.custom_vmap
def doubled(x):
    return 2 * x


@doubled.def_vmap
def _(axis_size, in_batched, x):
    return 2 * jnp.roll(x, 1, 0), True


def test_mapped_calls_that_are_mixed_up_are_seen():
    check_transformations(lambda x, y: x * y, PAIRS)
    with pytest.raises(AssertionError):
        check_transformations(lambda x, y: doubled(jax.lax.stop_gradient(x)) * y, PAIRS)


def test_a_call_that_depends_on_what_was_called_before_is_seen():
    calls = []
    with pytest.raises(AssertionError):
        check_transformations(lambda x, y: calls.append(0) or x * y * len(calls), PAIRS)


def test_a_shard_that_sees_only_itself_is_seen():
    arrays = {"x": np.arange(6.0, dtype=np.float32)}
    check_shard_map(lambda x: 2 * x, arrays, {"x": P("x")}, P("x"), devices=2)
    with pytest.raises(AssertionError):
        check_shard_map(jnp.cumsum, {"a": arrays["x"]}, {"a": P("x")}, P("x"), devices=2)
