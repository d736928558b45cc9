"""Mean pooling against float64 means, group by group."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import mean_pooling
from ejktest.cases.pooling import check_pool
from ejktest.drawn import normal
from ejktest.oracles import pooling as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_shard_map, check_transformations

# an empty sequence, one of a single row, rows of padding
CU = np.array([0, 9, 9, 10, 21], np.int32)


@partial(jax.jit, static_argnames=("chunk", "block"))
def run(x, cu, mask, chunk=None, block=4):
    return mean_pooling(x, cu, chunk_size=chunk, attention_mask=mask, cfg={"token_tile": block})


def check(x, cu=None, mask=None, chunk=None, block=4):
    return check_pool(partial(run, block=block), x, cu, mask, chunk)


@pytest.mark.parametrize("chunk", [None, 1, 5, 6, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_batches_match_the_reference(chunk, masked):
    mask = np.random.default_rng(0).integers(0, 2, (3, 23))
    mask[1, :12] = 0
    check(normal(3, 23, 2), None, mask if masked else None, chunk)


@pytest.mark.parametrize("chunk", [None, 1, 5, 6, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_match_the_reference(chunk, masked):
    mask = np.random.default_rng(1).integers(0, 2, 23).astype(bool)
    mask[:6] = False
    out = check(normal(23, 2), CU, mask if masked else None, chunk)
    assert out.shape == ((4, 2) if chunk is None else (4, -(-23 // chunk), 2))


def test_channels_and_default_block():
    x = normal(2, 300, 3, 2)
    check_close(mean_pooling(x), oracle.mean_pooling(x))
    check_close(mean_pooling(x[0], CU * 10), oracle.mean_pooling(x[0], CU * 10))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes_match_the_reference(dtype):
    with jax.enable_x64(dtype == "float64"):
        check(normal(2, 40, 3, dtype=dtype), chunk=7)
        check(normal(40, 3, dtype=dtype), CU)


@pytest.mark.parametrize("chunk", [None, 50000])
def test_rounding_does_not_grow_with_length(chunk):
    """64k rows with a mean: float32 sums lose nothing that matters."""
    x = 1 + normal(65536, 2)
    cu = np.array([0, 65000, 65536], np.int32)
    check(x, cu, None, chunk, block=128)
    check(x[None], None, None, chunk, block=128)


def test_nothing_to_average():
    for empty in (np.zeros(3, np.int32), np.zeros(1, np.int32)):
        np.testing.assert_array_equal(check(normal(23, 2), empty), 0)
    for shape, cu in (((2, 0, 3), None), ((0, 3), np.zeros(3, np.int32))):
        for chunk in (None, 4):
            want = oracle.mean_pooling(np.zeros(shape), cu, chunk_size=chunk)
            out = mean_pooling(jnp.zeros(shape), cu, chunk_size=chunk)
            np.testing.assert_array_equal(out, want)


def test_excluded_rows_may_hold_anything():
    x = normal(23, 2).at[jnp.array([3, 22])].set(jnp.nan)
    mask = np.arange(23) != 3
    for chunk in (None, 5):
        out, back = jax.vjp(lambda x, chunk=chunk: run(x, CU, mask, chunk), x)
        assert np.isfinite(out).all() and np.isfinite(back(jnp.ones_like(out))[0]).all()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from([1, 8, 19]),
    bounds=st.lists(st.integers(0, 19), min_size=2, max_size=2),
    chunk=st.sampled_from([None, 4]),
)
def test_any_lengths(rows, bounds, chunk):
    cu = np.array([0, *sorted(min(c, rows) for c in bounds)], np.int32)
    check(normal(rows, 2), cu, None, chunk, block=3)


def test_transformations_keep_results():
    pairs = {"x": normal(2, 23, 2), "cu": jnp.stack([CU, CU // 2])}
    pool = partial(run, mask=None, chunk=5)
    check_transformations(pool, pairs)

    def along(t):
        return jnp.sum(jnp.sin(pool(t * pairs["x"][0], CU)))

    reverse = jax.jit(jax.grad(jax.grad(along)))(1.0)
    np.testing.assert_allclose(jax.jit(jax.hessian(along))(1.0), reverse, rtol=1e-5)


def test_shard_map():
    pool, columns = partial(run, mask=None, chunk=None), P(None, "x")
    check_shard_map(pool, {"x": normal(23, 2), "cu": CU}, {"x": columns}, columns, devices=2)
