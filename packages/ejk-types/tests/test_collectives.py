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

from ejkernel.types.collectives import count_words, gather, join_bits, permute, split_bits

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


def send_joined(*arrays: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:N]), ("sp",))

    def body(*arrays: Any) -> Any:
        words = join_bits(arrays)
        assert words.size == count_words(arrays, words.dtype)
        return split_bits(permute(words, "sp", ROUTE), arrays)

    return jax.shard_map(body, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"))(*arrays)


def test_arrays_of_two_dtypes_in_one_transfer() -> None:
    x, row = jnp.arange(2 * N, dtype=jnp.bfloat16), jnp.arange(3.0 * N).reshape(N, 3) / 7
    program = jax.jit(send_joined).lower(x, row).compile()
    assert program.as_text().count(" collective-permute(") == 1
    for sent, alone in zip(program(x, row), (send(x), send(row)), strict=True):
        assert sent.dtype == alone.dtype
        np.testing.assert_array_equal(sent, alone)


def gathered(*arrays: Any) -> Any:
    """Every array of all devices, on each of them."""
    mesh = Mesh(np.array(jax.devices()[:N]), ("sp",))

    def body(*arrays: Any) -> Any:
        return [jnp.stack(parts) for parts in gather([x[0] for x in arrays], "sp")]

    run = partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False)
    return run(body, in_specs=P("sp"))(*arrays)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_arrays_of_several_dtypes_are_gathered_at_once(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 16, (N, 3, 4, 128), dtype=np.uint16)
    # XLA changes the payload of a bfloat16 NaN on CPUs
    words = np.where(words & 0x7F80 == 0x7F80, words & 0xFF80, words)
    x = words.view(dtype) if dtype == jnp.bfloat16 else (words >> 1).astype(dtype)
    row = rng.integers(0, 1 << 32, (N, 3, 4), dtype=np.uint32).view(np.float32)
    program = jax.jit(gathered).lower(jnp.asarray(x), jnp.asarray(row)).compile()
    assert program.as_text().count(" all-gather(") == 1
    for found, sent in zip(program(jnp.asarray(x), jnp.asarray(row)), (x, row), strict=True):
        assert found.dtype == sent.dtype and np.asarray(found).tobytes() == sent.tobytes()


def test_gradients_of_gathered_arrays_are_summed_over_the_devices() -> None:
    x, row = jnp.ones((N, 2), jnp.bfloat16), jnp.ones((N, 3))

    def loss(x: Any, row: Any) -> Any:
        x, row = gathered(x, row)
        scale = jnp.arange(1.0, N + 1)[:, None]
        return jnp.sum(scale * x.astype(jnp.float32)) + jnp.sum(scale * row**2)

    for gradient, factor in zip(jax.jit(jax.grad(loss, (0, 1)))(x, row), (1, 2), strict=True):
        expected = np.broadcast_to(factor * np.arange(1.0, N + 1)[:, None], gradient.shape)
        np.testing.assert_array_equal(gradient.astype(jnp.float32), expected)
