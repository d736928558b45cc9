"""Native sparse attention on a GPU: real sizes against float64, and two runs alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest import sparse_cases
from ejktest.oracles import sparse as oracle
from ejktest.tolerance import check_close

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.native_sparse_attention import native_sparse_attention, select
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem
from ejkernel.kernels.triton.targets import current_target
from ejkernel.types.token_blocks import block_means, find_blocks

pytestmark = pytest.mark.gpu
# float32 products run as TF32, whose digits are those of float16
WORKING = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float16"}


@pytest.fixture(autouse=True, scope="module")
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    compat.toolchain()


@pytest.mark.parametrize("name", sparse_cases.CASES)
def test_selected_against_float64(name):
    case = sparse_cases.CASES[name]
    run, x = sparse_cases.pull(native_sparse_attention, name)
    got, again = run(**x), run(**x)
    want = oracle.over_lists(
        x["query"][0], x["key"][0], x["value"][0], x["block_indices"][0], case.size,
        case.dim**-0.5, x["do"][0],
    )  # fmt: skip
    for label, a, b, w in zip(("o", "dq", "dk", "dv"), got, again, want, strict=True):
        check_close(a[0], w, dtype=WORKING[case.dtype], name=label)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "dim", "size", "slots", "dtype"),
    [
        (2000, 32, 2, 128, 16, 16, "bfloat16"),
        (1000, 6, 2, 80, 16, 40, "float16"),
        (500, 4, 4, 64, 4, 70, "float32"),
    ],
)
def test_chosen_blocks_have_the_best_scores(length, heads, kv_heads, dim, size, slots, dtype):
    """Float32 scores against those of float64: near-equal ones may change places."""
    rng = np.random.default_rng(0)
    q, k = (
        jnp.asarray(2 * rng.standard_normal((1, length, n, dim)), dtype) for n in (heads, kv_heads)
    )
    blocks = find_blocks(length, size)
    p = Problem(
        1, length, heads, kv_heads, dim, dim, size, blocks.count, slots, dim**-0.5, dtype, False
    )
    found = jax.jit(lambda q, k: select.select(p, current_target(), q, k, blocks, True))(q, k)
    means = np.asarray(block_means(k, blocks), np.float64)[0]
    grouped = np.asarray(q, np.float64)[0].reshape(length, kv_heads, -1, dim)
    x = np.einsum("skgd,nkd->skgn", grouped, means) * p.scale
    t = np.arange(length)
    seen = ((t[:, None] + 1) // size > np.arange(blocks.count))[:, None, None]
    e = np.exp(np.where(seen, x, -np.inf))
    score = (e / np.maximum(e.sum(-1, keepdims=True), 1e-300)).sum(2)
    score = np.where(seen[:, :, 0], score, -1.0)
    score[t, :, t // size] = 1e3
    best = -np.sort(-score, axis=-1)[..., :slots]
    found = np.asarray(found)[0]
    got = np.where(found < 0, -1.0, np.take_along_axis(score, np.maximum(found, 0), -1))
    np.testing.assert_allclose(got, best, rtol=1e-5, atol=1e-7)
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in found.reshape(-1, slots))
