"""Ragged attention on a GPU: mixes at real size, writes in place, one program for a server."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types.serving.plan import make_plan
from ejktest.cases import ragged as cases

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


@pytest.mark.parametrize(("name", "most"), [("few rows", None), ("decoding", 8)])
def test_with_a_plan(name: str, most: int | None) -> None:
    """Of few rows the same bits; of many the form that a promise of short sequences allows."""
    m = cases.CASES[name]
    x = cases.draw(m)
    _, args = cases.writing(ragged_page_attention_v3, m, x)
    q, _, _, _, lens, _, starts, ends = args
    plan = make_plan(lens, starts, ends[2], q.shape[0], most)
    f, args = cases.writing(partial(ragged_page_attention_v3, plan=plan), m, x)
    out, cache = jax.jit(f)(*args)
    assert cases.error(m, x, cache, out) <= cases.BOUND[m.q]
    f, args = cases.writing(ragged_page_attention_v3, m, x)
    usual, expected = jax.jit(f)(*args)
    assert jnp.array_equal(cache.view("uint8"), expected.view("uint8"))
    if most is None:
        np.testing.assert_array_equal(out, usual)


@pytest.mark.parametrize("name", ["few rows", "decoding", "page 16"])
def test_a_donated_cache_stays_where_it_is(name: str) -> None:
    m = cases.CASES[name]
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


KINDS = {"int8": (-128, 127), "float8_e4m3fn": (-448, 448), "float8_e5m2": (-57344, 57344)}


@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_are_those_of_an_exact_division(kind: str) -> None:
    """Bit by bit: huge values, tiny ones, NaN and inf, and unusual divisors."""
    rng, (n, heads, d) = np.random.default_rng(0), (256, 8, 128)
    scales = np.float32([0.0217, 1.0, 3.0, -0.7, 1 / 3, 2.0**-61, 1.7e20, 1.9999999])
    wide = rng.standard_normal((2, n, heads, d)) * np.exp2(rng.integers(-12, 12, (2, n, heads, d)))
    wide = (wide * scales[:, None]).astype(np.float32)
    # on the ties of integers and of 8-bit floats, and beside them
    ties = (rng.integers(-300, 300, (32, heads, d)) / 2 * scales[:, None]).astype(np.float32)
    wide[0, :32], wide[1, :32] = ties, np.nextafter(ties, 0)
    wide[:, 40, :, :5] = np.nan, np.inf, -np.inf, 3.4e38, -0.0
    q = jnp.zeros((n, 32, d), jnp.float32)
    cache = jnp.zeros((n // 16, 16, 2 * heads, d), kind)
    tables, starts = jnp.arange(n // 16, dtype=jnp.int32)[None], jnp.asarray([0, n], jnp.int32)
    lens, ends = jnp.asarray([n], jnp.int32), jnp.asarray([0, 0, 1], jnp.int32)
    keys, values = map(jnp.asarray, wide)
    step = jax.jit(ragged_page_attention_v3)
    _, cache = step(
        q, keys, values, cache, lens, tables, starts, ends,
        k_scale=jnp.asarray(scales), v_scale=jnp.asarray(scales),
    )  # fmt: skip
    with np.errstate(all="ignore"):
        y = wide / scales[:, None]
        y = np.clip(np.rint(y) if kind == "int8" else y, *KINDS[kind])
        want = np.where(np.isnan(y), 0, y).astype(np.int8) if kind == "int8" else y.astype(kind)
    got = np.asarray(cache).reshape(n, heads, 2, d).transpose(2, 0, 1, 3)
    unlike = (got.view(np.uint8) != want.view(np.uint8)) & ~np.isnan(want.astype(np.float32))
    assert not unlike.any(), (wide[unlike][:5], got[unlike][:5], want[unlike][:5])
    assert (np.isnan(got.astype(np.float32)) == np.isnan(want.astype(np.float32))).all()
