"""Ragged attention on a GPU: mixes at real size, writes in place, one program for a server."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest import ragged_cases as cases

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import (
    ragged_decode_attention,
    ragged_page_attention,
    ragged_page_attention_v3,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", cases.CASES)
def test_write_then_attend(name: str) -> None:
    m = cases.CASES[name]
    x = cases.draw(m)
    f, args = cases.writing(ragged_page_attention_v3, m, x)
    step = jax.jit(f)
    (out, cache), (again, written) = (step(*args) for _ in range(2))
    np.testing.assert_array_equal(out, again)
    assert jnp.array_equal(jnp.asarray(cache).view("uint8"), written.view("uint8"))
    assert cases.error(m, x, cache, out) <= cases.BOUND[m.q]
    if name in cases.READ:
        f, args = cases.reading(ragged_page_attention, m, x | {"cache": cache})
        assert cases.error(m, x, cache, jax.jit(f)(*args)) <= cases.BOUND[m.q]


def test_a_donated_cache_stays_where_it_is() -> None:
    m = cases.CASES["page 16"]
    x = cases.draw(m)
    f, args = cases.writing(ragged_page_attention_v3, m, x)
    step = jax.jit(f, donate_argnums=3)
    compiled = step.lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= x["cache"].nbytes
    assert memory.temp_size_in_bytes < x["cache"].nbytes
    before = x["cache"].unsafe_buffer_pointer()
    cache = compiled(*args)[1]
    assert cache.unsafe_buffer_pointer() == before and x["cache"].is_deleted()


def test_a_serving_loop_compiles_once() -> None:
    m = cases.CASES["page 16"]
    x = cases.draw(m)
    f, (q, keys, values, cache, lens, tables, starts, ends) = cases.writing(
        ragged_page_attention_v3, m, x
    )
    step = jax.jit(f, donate_argnums=3)
    for i in range(3):
        _, cache = step(q, keys, values, cache, lens - i, tables, starts, ends - i)
    assert step._cache_size() == 1


def test_contiguous_decoding() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (5, 32, 128), jnp.bfloat16)
    k, v = (jax.random.normal(x, (5, 3001, 8, 128), jnp.bfloat16) for x in keys[1:])
    start, end = np.array([0, 17, 3000, 40, 9]), np.array([3001, 2500, 3001, 40, 100])
    got = ragged_decode_attention(q, k, v, start, end, sliding_window=2000)
    j = np.arange(3001)
    seen = (j >= start[:, None]) & (j < end[:, None]) & (j >= end[:, None] - 2001)
    g = q.astype(jnp.float32).reshape(5, 8, 4, 128)
    s = jnp.einsum("bhgd,bthd->bhgt", g, k.astype(jnp.float32), precision="highest") * 128**-0.5
    p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -1e30), axis=-1)
    want = jnp.einsum("bhgt,bthd->bhgd", p, v.astype(jnp.float32), precision="highest")
    want = want.reshape(5, 32, 128) * (end > start)[:, None, None]
    error = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
    assert float(error) <= 6e-3
