"""A bias with one row for all queries is that row repeated, in values and in gradients."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import ejkernel.modules as modules
from ejkernel.ops import InvalidArgument, interpret_mode
from ejktest.calls import B, D, H, S, call
from ejktest.variants import normal

BIASED = ["flash_attention", "attention", "scaled_dot_product_attention", "blocksparse_attention"]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("ejkernel.kernels.triton") is None,
    reason="the package of Triton kernels is not installed",
)


def assert_row_is_every_row(run, row, *others, tolerance=1e-5):
    def loss(bias, *others):
        out = jax.tree.leaves(run(bias, *others))
        return sum(jnp.sin(x).sum() for x in out), out

    def grads(bias):
        wanted = tuple(range(1 + len(others)))
        return jax.jit(jax.grad(loss, wanted, has_aux=True))(bias, *others)

    (drow, *rest), out = grads(row)
    (dfull, *expected), full = grads(jnp.broadcast_to(row, (*row.shape[:2], S, S)))
    for a, b in zip((drow, rest, out), (dfull.sum(2, keepdims=True), expected, full), strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.shape == y.shape
            np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("operation", [*BIASED, "mla_attention"])
def test_one_row_for_all_queries(operation):
    c = call(operation)
    arrays = {n: x for n, x in c.arrays.items() if n != "bias"}
    heads = 1 if operation == "flash_attention" else H
    first = next(iter(arrays))

    def run(bias, x):
        return getattr(modules, operation)(
            **{**arrays, first: x}, bias=bias, **c.static, platform="xla"
        )

    assert_row_is_every_row(run, normal(B, heads, 1, S), arrays[first])


def test_one_row_in_tiles():
    from ejkernel.kernels.xla import flash_attention

    tiles = dict.fromkeys(("q_blocksize", "kv_blocksize"), 4)
    cfg = {"fwd_params": tiles, "bwd_params": tiles}
    arrays = call("flash_attention").arrays

    def run(bias, k):
        return flash_attention(arrays["query"], k, arrays["value"], bias, causal=True, cfg=cfg)

    assert_row_is_every_row(run, normal(1, H, 1, S), arrays["key"])


@needs_triton
def test_one_row_in_triton():
    arrays = call("flash_attention").arrays
    q, k, v = arrays["query"], arrays["key"], normal(B, S, 2, D)

    def run(bias, q):
        return modules.flash_attention(q, k, v, bias, platform="triton", precision="highest")

    with interpret_mode():
        assert_row_is_every_row(run, normal(B, 1, 1, S), q, tolerance=2e-5)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_one_row_around_a_ring():
    arrays = call("flash_attention").arrays
    mesh = Mesh(np.array(jax.devices()[:2]), ("sp",))

    def run(bias, q):
        k, v = arrays["key"], arrays["value"]
        return modules.ring_attention(q, k, v, bias, axis_name="sp", mesh=mesh, causal=True)

    assert_row_is_every_row(run, normal(B, 1, 1, S), arrays["query"])


def test_another_number_of_rows_is_refused():
    arrays = call("flash_attention").arrays
    for run in (modules.flash_attention, modules.blocksparse_attention):
        with pytest.raises(InvalidArgument, match=r"bias: expected float\[#batch, #heads, #q_len"):
            run(arrays["query"], arrays["key"], arrays["value"], bias=normal(B, 1, 2, S))
