"""Latent decoding on a GPU at real sizes: values, repeatability, memory that nobody may see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.cases import latent as cases

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import mla_decode
from ejkernel.kernels.triton.targets import current_target
from ejktest.ahead import compile_cases
from ejktest.at_size import names_in_run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    compile_cases(cases, "mla_decode", names_in_run(request), current_target())


@pytest.mark.parametrize("name", cases.CASES)
def test_against_float32(name: str) -> None:
    """Two runs have the same bits, whatever lies in memory past the contexts."""
    cases.check(name, mla_decode)


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("length", [0, 1, 1001, 4096, 100001])
def test_one_launch_of_a_single_sequence(length: int, heads: int) -> None:
    """It has the values of two launches, and the same bits in every run and call."""
    pages = length // 64 + 2
    q, cache = (
        jax.random.normal(jax.random.key(n), shape, jnp.bfloat16)
        for n, shape in enumerate([(1, heads, 576), (pages, 64, 576)])
    )
    tables = jax.random.permutation(jax.random.key(2), pages)[None].astype(jnp.int32)
    call = {"context_lens": jnp.array([length], jnp.int32), "block_tables": tables}
    call |= {"latent_dim": 512, "return_lse": True}

    @jax.jit
    def run_twice(q):
        first = mla_decode(q, cache, **call, cfg={"num_launches": 1})
        # the second call has another query with the same values
        again = q + 0 * jnp.sum(first[0])
        return first, mla_decode(again, cache, **call, cfg={"num_launches": 1})

    want = jax.jit(lambda q: mla_decode(q, cache, **call, cfg={"num_launches": 2}))(q)
    expected = run_twice(q)
    for actual, other in zip(expected[0], want, strict=True):
        actual, other = (np.asarray(x, np.float32) for x in (actual, other))
        np.testing.assert_allclose(actual, other, rtol=2**-7, atol=2**-7 * 0.02)
    for _ in range(20):
        for results in run_twice(q):
            for actual, first in zip(results, expected[0], strict=True):
                np.testing.assert_array_equal(actual, first)
