"""Kernels that write into an operand's memory, where that operand is a slice of a larger array.

Models stack the caches or states of their layers and scan over them. XLA may then let a call read
its operands from slices and write its results into slices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import ragged_page_attention_v3, recurrent_attention

pytestmark = pytest.mark.gpu

LAYERS = 3
ROWS, LENS, PAGE, PAGES = (1, 1, 7, 20), (40, 17, 30, 20), 16, 24


def ragged_layer(dtype: str) -> tuple[Any, jax.Array, jax.Array]:
    """Returns a layer that writes a paged cache, its first input, and stacked caches."""
    rng = np.random.default_rng(0)
    heads, kv_heads, dim, tokens = 4, 2, 64, sum(ROWS) + 3

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    keys, values = draw(tokens, kv_heads, dim), draw(tokens, kv_heads, dim)
    tables = jnp.asarray(rng.permutation(PAGES)[:16].reshape(4, 4), jnp.int32)
    starts = jnp.asarray(np.cumsum([0, *ROWS]), jnp.int32)
    lens, distribution = jnp.asarray(LENS, jnp.int32), jnp.asarray([0, 0, 4], jnp.int32)

    def layer(x, cache):
        return ragged_page_attention_v3(
            x, keys, values, cache, lens, tables, starts, distribution
        )  # fmt: skip

    caches = draw(LAYERS, PAGES, PAGE, 2 * kv_heads, dim)
    return layer, draw(tokens, heads, dim), caches


def recurrent_layer(dtype: str) -> tuple[Any, jax.Array, jax.Array]:
    """Returns a layer that updates a recurrent state by one token, its input, stacked states."""
    rng = np.random.default_rng(0)
    batch, heads, dim = 4, 4, 64

    def draw(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    key, value = draw(batch, 1, heads, dim), draw(batch, 1, heads, dim)
    gate = -jnp.abs(draw(batch, 1, heads, dtype="float32"))

    def layer(x, state):
        return recurrent_attention(x, key, value, gate, initial_state=state, return_state=True)

    states = draw(LAYERS, batch, heads, dim, dim, dtype="float32")
    return layer, draw(batch, 1, heads, dim), states


def with_carry(layer):
    """Returns the layer as the body of a loop that carries all caches."""

    def body(i, carry):
        x, caches = carry
        x, cache = layer(x, jax.lax.dynamic_index_in_dim(caches, i, keepdims=False))
        return x, jax.lax.dynamic_update_index_in_dim(caches, cache, i, 0)

    return body


def static_slices(layer, x, caches):
    new = []
    for i in range(LAYERS):
        x, cache = layer(x, caches[i])
        new.append(cache)
    return x, jnp.stack(new)


def static_updates(layer, x, caches):
    for i in range(LAYERS):
        x, cache = layer(x, caches[i])
        caches = caches.at[i].set(cache)
    return x, caches


WAYS = {
    "scan": lambda layer, x, caches: jax.lax.scan(layer, x, caches),
    "unrolled scan": lambda layer, x, caches: jax.lax.scan(layer, x, caches, unroll=LAYERS),
    "carried": lambda layer, x, caches: jax.lax.fori_loop(
        0, LAYERS, with_carry(layer), (x, caches)
    ),
    "static slices": static_slices,
    "static updates": static_updates,
}
LAYERS_OF = {"ragged": ragged_layer, "recurrent": recurrent_layer}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", LAYERS_OF)
@pytest.mark.parametrize("way", WAYS)
def test_layers_over_stacked_caches(kind, way, dtype):
    layer, x, caches = LAYERS_OF[kind](dtype)
    expected = static_slices(layer, x, caches)  # eager: every cache is an array of its own
    for donate in ((), (1,)):
        run = jax.jit(lambda x, caches: WAYS[way](layer, x, caches), donate_argnums=donate)
        got = run(x, caches + 0)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", LAYERS_OF)
@pytest.mark.parametrize("axis", [0, -1])
def test_mapped_caches(kind, axis, dtype):
    layer, x, caches = LAYERS_OF[kind](dtype)
    calls = [layer(x, cache) for cache in caches]
    expected = jax.tree.map(lambda *parts: jnp.stack(parts), *calls)
    mapped = jax.vmap(layer, in_axes=(None, axis))
    got = jax.jit(mapped)(x, jnp.moveaxis(caches, 0, axis))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
