"""Grouped matrix products on a GPU: awkward groups at real tile sizes, and two runs alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.cases import grouped as cases

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import grouped_matmul
from ejkernel.kernels.triton.targets import current_target
from ejktest.ahead import compile_cases

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    compile_cases(cases, "grouped_matmul", cases.CASES, current_target())


@pytest.mark.parametrize(("sizes", "kind", "transposed"), cases.CASES)
def test_against_float64(sizes: str, kind: str, transposed: bool) -> None:
    found = cases.errors(grouped_matmul, sizes, kind, transposed)
    assert max(found.values()) <= cases.KINDS[kind][-1], found


@pytest.mark.parametrize("zipf", [False, True])
@pytest.mark.parametrize("name", cases.AT_SIZE)
def test_sizes_of_models(name: str, zipf: bool) -> None:
    """Values, both gradients, and the bits of a second run."""
    cases.check_at_size(grouped_matmul, name, zipf)


@pytest.mark.parametrize("case", cases.STORED)
def test_eight_bit_matrices(case: str) -> None:
    run, arrays, want = cases.stored_case(grouped_matmul, case)
    cases.check_results_of_8_bits(run(*arrays), arrays, want, case)


def test_highest_precision() -> None:
    found = cases.errors(grouped_matmul, "around a tile", "float32", False, precision="highest")
    assert max(found.values()) <= 2e-6, found


def test_two_runs_and_mapped_runs_have_the_same_bits() -> None:
    """A mapped axis changes when a tile is computed, and nothing in its accumulator."""
    keys = jax.random.split(jax.random.key(0), 2)
    lhs = jax.random.normal(keys[0], (2, 700, 256), jnp.bfloat16)
    rhs = jax.random.normal(keys[1], (5, 256, 512), jnp.bfloat16)
    sizes = jnp.array([[130, 0, 64, 300, 100], [1, 699, 0, 0, 0]])

    def pull(lhs, sizes):
        out, back = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes), lhs, rhs)
        return out, *back(out)

    single = jax.jit(pull)
    once, again = ([single(x, s) for x, s in zip(lhs, sizes, strict=True)] for _ in range(2))
    mapped = jax.jit(jax.vmap(pull))(lhs, sizes)
    for i in range(2):
        for a, b, c in zip(once[i], again[i], mapped, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c[i])
