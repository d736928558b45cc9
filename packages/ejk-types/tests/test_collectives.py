"""Sending arrays along a mesh axis of virtual devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.types.collectives import permute

N = 4
pytestmark = pytest.mark.skipif(len(jax.devices()) < N, reason="needs four devices")
ROUTE = tuple((i, i + 1) for i in range(N - 1))  # nothing reaches the first


def send(x: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:N]), ("sp",))
    body = partial(permute, axes="sp", route=ROUTE)
    return jax.shard_map(body, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"))(x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32])
def test_values_arrive_bit_by_bit_and_need_one_more_array_at_most(dtype: Any) -> None:
    count = 1 << 12
    words = np.random.default_rng(0).integers(0, 1 << 16, N * count, dtype=np.uint16)
    # all bfloat16 values, NaNs with their payloads among them
    x = words.view(dtype) if dtype == jnp.bfloat16 else (words >> 1).astype(dtype)
    mesh = Mesh(np.array(jax.devices()[:N]), ("sp",))
    x = jax.device_put(jnp.asarray(x), NamedSharding(mesh, P("sp")))
    program = jax.jit(send).lower(x).compile()
    assert program.memory_analysis().temp_size_in_bytes <= count * x.dtype.itemsize
    before, sent = np.asarray(x), np.asarray(program(x))
    assert sent[count:].tobytes() == before[:-count].tobytes()
    assert not sent[:count].view(np.uint8).any()


def test_gradients_go_the_other_way() -> None:
    x = jnp.arange(2 * N, dtype=jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(send(x) ** 2)))
    np.testing.assert_array_equal(gradient(x), [0, 2, 4, 6, 8, 10, 0, 0])
    second = jax.jit(jax.grad(lambda x: jnp.sum(gradient(x))))(x)
    np.testing.assert_array_equal(second, [2] * (2 * N - 2) + [0, 0])
