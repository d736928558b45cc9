"""Paged decoding on a GPU at real sizes: values, repeatability, memory that nobody may see."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.cases import paged as cases

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import page_attention
from ejkernel.kernels.triton.targets import current_target
from ejktest.ahead import compile_cases
from ejktest.at_size import names_in_run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    compile_cases(cases, "page_attention", names_in_run(request), current_target())


@pytest.mark.parametrize("name", cases.CASES)
def test_against_float32(name: str) -> None:
    """Two runs have the same bits, whatever lies in memory past the contexts."""
    cases.check(name, page_attention)


@pytest.mark.parametrize("length", [0, 1, 1001, 4096, 100001])
def test_one_launch_of_a_single_sequence(length: int) -> None:
    """It has the values of two launches, and the same bits in every run."""
    pages = length // 16 + 2
    shapes = [(1, 32, 128), (pages, 16, 8, 128), (pages, 16, 8, 128)]
    q, *caches = (
        jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n, shape in enumerate(shapes)
    )
    tables = jax.random.permutation(jax.random.key(3), pages)[None].astype(jnp.int32)
    where = jnp.array([length], jnp.int32), tables

    def run(launches: int) -> Any:
        cfg = {"num_launches": launches}
        return jax.jit(lambda q: page_attention(q, *caches, *where, return_lse=True, cfg=cfg))

    want, run_once = run(2)(q), run(1)
    first = run_once(q)
    for actual, other in zip(first, want, strict=True):
        actual, other = (np.asarray(x, np.float32) for x in (actual, other))
        np.testing.assert_allclose(actual, other, rtol=2**-7, atol=2**-7 * 0.02)
    for _ in range(20):
        for actual, other in zip(run_once(q), first, strict=True):
            np.testing.assert_array_equal(actual, other)


@pytest.mark.parametrize("kind", [cases.I8, cases.E4, cases.E5])
def test_every_8_bit_number_is_read_exactly(kind: Any) -> None:
    assert cases.every_code(kind, page_attention) == 0
