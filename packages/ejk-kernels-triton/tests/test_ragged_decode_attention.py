"""Decoding from a contiguous cache through Triton's interpreter, against a float64 oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejktest.bound import bound
from ejktest.oracles import paged
from ejktest.tolerance import check_close

pytest.importorskip("triton")

from ejkernel.kernels.triton import ragged_decode_attention

START, END = np.array([0, 30, 7, -9, 20]), np.array([70, 30, 40, 1000, 12])


@pytest.fixture(autouse=True)
def few_programs():
    with interpret_mode(), compile_for(cuda_target(90, 2)):
        yield


def draw(length, h=4, hk=2, d=16, dv=24, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (len(END), h, d), (len(END), length, hk, d), (len(END), length, hk, dv)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


SINKS = np.random.default_rng(7).standard_normal((4, 2)).astype(np.float32)


@pytest.mark.parametrize(
    ("length", "dtype", "options"),
    [
        (75, np.float32, {}),
        (
            128,
            ml_dtypes.bfloat16,
            dict(sliding_window=(20, 0), softmax_aux=SINKS, logits_soft_cap=2.0),
        ),
    ],
    ids=["odd length", "window cap sinks"],
)
def test_against_the_formula(length, dtype, options):
    q, k, v = draw(length, dtype=dtype)
    got, lse = ragged_decode_attention(q[:, None], k, v, START, END, return_lse=True, **options)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in (q, k, v)]
        want = paged.ragged_decode_attention(
            *wide, START, END, scale=0.25, cap=options.get("logits_soft_cap"),
            left=20 if options else None, aux=np.asarray(SINKS, np.float64) if options else None,
            return_lse=True,
        )  # fmt: skip
        want, want_lse = map(np.asarray, want)
    assert got.shape == (5, 1, 4, 24) and got.dtype == q.dtype
    check_close(np.asarray(got)[:, 0], want)
    check_close(np.asarray(lse)[:, 0], want_lse, dtype=got.dtype, name="lse")
    assert not np.asarray(got, np.float32)[[1, 4]].any()


def test_outside_of_slices_and_mapped_calls():
    q, k, v = draw(64)
    ends = np.minimum(END, 64)

    def f(q, k, v, start):
        return ragged_decode_attention(q, k, v, start, ends)

    base = np.asarray(f(q, k, v, START))
    j = np.arange(64)
    seen = (j >= START[:, None]) & (j < ends[:, None])
    spoiled = [np.where(seen[..., None, None], x, np.float32(np.nan)) for x in (k, v)]
    np.testing.assert_array_equal(f(q, *spoiled, START), base)
    both = jax.vmap(f, (0, None, 0, 0))(
        np.stack([q, q]), k, np.stack([v, -v]), np.stack([START, START])
    )
    np.testing.assert_allclose(both, np.stack([base, -base]), atol=1e-6)


def test_gradients_and_refusals():
    xla = pytest.importorskip("ejkernel.kernels.xla")
    q, k, v = draw(20)

    def grad(fn):
        def f(q, k, v, aux):
            return jnp.sin(fn(q, k, v, START, END, aux, logits_soft_cap=3.0, cfg=None)).sum()

        return jax.jit(jax.grad(f, (0, 1, 2, 3)))(q, k, v, SINKS)

    ours, theirs = grad(ragged_decode_attention), grad(xla.ragged_decode_attention)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    with jax.enable_x64(True):
        call = bound(ragged_decode_attention.call, query=q, key=k, value=v.astype(np.float64),
                     sequence_start=START, sequence_end=END)  # fmt: skip
        problem = ragged_decode_attention.problem(call.arguments)
    assert ragged_decode_attention.unsupported_reason(problem, cuda_target(90)).startswith(
        "value: float64"
    )
    empty = ragged_decode_attention(q, k[:, :0], v[:, :0], START, END)
    assert empty.shape == (5, 4, 24) and not np.asarray(empty).any()


def test_a_call_is_two_launches_and_nothing_else():
    args = [jnp.asarray(x) for x in (*draw(80), START, END)]
    program = str(jax.make_jaxpr(lambda *x: ragged_decode_attention(*x))(*args))
    assert program.count("ejkernel_triton[") == 2 and "iota" not in program
