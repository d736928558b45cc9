"""Grouped matmul against a float64 loop over the groups."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import grouped_matmul
from ejktest.cases import grouped as cases
from ejktest.drawn import array
from ejktest.oracles import grouped as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_shard_map

M, K, N, G = 37, 6, 5, 4
SMALL = (("block_m", 4),)


def normal(*shape, seed=0, dtype=jnp.float32):
    return array(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


@partial(jax.jit, static_argnames=("tile", "options"))
def pull(lhs, rhs, sizes, offset, existing, dout, tile=4, options=()):
    """The result and its gradients, group_sizes and group_offset traced."""

    def run(lhs, rhs, existing):
        return grouped_matmul(
            lhs, rhs, sizes, offset, existing, cfg={"block_m": tile}, **dict(options)
        )

    out, back = jax.vjp(run, lhs, rhs, existing)
    return out, back(dout.astype(out.dtype))


def narrower(a, b):
    return min(a.dtype, b.dtype, key=lambda d: d.itemsize)


def check(lhs, rhs, sizes, offset=None, existing=None, *, tile=4, **options):
    n = rhs.shape[1 if options.get("transpose_rhs") else 2]
    dout = normal(lhs.shape[0], n, seed=7)
    sizes = np.asarray(sizes, np.int32)
    out, (dlhs, drhs, dexisting) = pull(
        lhs, rhs, sizes, offset, existing, dout, tile, tuple(options.items())
    )
    options.pop("preferred_element_type", None)
    dout = dout.astype(out.dtype)
    want = oracle.grouped_matmul(lhs, rhs, sizes, offset, existing, dout=dout, **options)
    check_close(out, want.out, name="out")
    check_close(dlhs, want.dlhs, dtype=narrower(dlhs, out), name="dlhs")
    check_close(drhs, want.drhs, dtype=narrower(drhs, out), name="drhs")
    assert (dlhs.dtype, drhs.dtype) == (lhs.dtype, rhs.dtype)
    if existing is not None:
        np.testing.assert_array_equal(dexisting, dout.astype(existing.dtype))
    return out


SIZES = {
    "exact": [10, 3, 20, 4],
    "rows left": [10, 0, 20, 3],
    "too many": [10, 20, 30, 40],
    "empty at both ends": [0, 1, 36, 0],
    "none": [0, 0, 0, 0],
    "one": [0, 0, 37, 0],
    "huge": [2**31 - 1, 2**31 - 1, 5, 2**31 - 1],
}


@pytest.mark.parametrize("sizes", SIZES)
def test_group_sizes_match_the_reference(sizes):
    check(normal(M, K), normal(G, K, N), SIZES[sizes])
    check(normal(M, K), normal(G, N, K), SIZES[sizes], transpose_rhs=True)


@pytest.mark.parametrize("tile", [1, 16, 64])
def test_tiles_do_not_matter(tile):
    check(normal(M, K), normal(G, K, N), SIZES["rows left"], tile=tile)


def test_default_tile():
    lhs, rhs, sizes = normal(M, K), normal(G, K, N), np.array(SIZES["rows left"])
    check_close(grouped_matmul(lhs, rhs, sizes), oracle.grouped_matmul(lhs, rhs, sizes).out)


def test_offsets_compose():
    """Two halves of the groups, one call after the other, are the whole."""
    lhs, rhs, sizes = normal(M, K), normal(G, K, N), SIZES["exact"]
    offset = jnp.array(0)
    first = check(lhs, rhs[:2], sizes, offset, normal(M, N, seed=3))
    both = check(lhs, rhs[2:], sizes, jnp.array([2]), first)
    want = oracle.grouped_matmul(lhs, rhs, sizes, existing_out=normal(M, N, seed=3))
    check_close(both, want.out)
    static = grouped_matmul(lhs, rhs[2:], np.array(sizes), 2, first)
    np.testing.assert_allclose(static, both, atol=1e-5)


def test_offset_past_the_groups():
    """A traced offset that reaches past the groups gives nothing there."""
    lhs, rhs = normal(M, K), normal(2, K, N)
    run = jax.jit(grouped_matmul)
    out = run(lhs, rhs, jnp.array(SIZES["exact"]), jnp.array(3))
    want = oracle.grouped_matmul(lhs, rhs, SIZES["exact"], 3).out
    check_close(out, want)
    np.testing.assert_array_equal(run(lhs, rhs, jnp.array(SIZES["exact"]), jnp.array(9)), 0)


def test_rows_of_nobody_may_hold_anything():
    lhs = normal(M, K).at[33:].set(jnp.nan)
    clean = normal(M, K).at[33:].set(0)
    sizes = np.array(SIZES["rows left"], np.int32)
    out, (dlhs, drhs, _) = pull(lhs, normal(G, K, N), sizes, None, None, normal(M, N, seed=7))
    want, (dclean, dwant, _) = pull(clean, normal(G, K, N), sizes, None, None, normal(M, N, seed=7))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(drhs, dwant)
    np.testing.assert_array_equal(dlhs, dclean)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_dtypes_match_the_reference(dtype):
    lhs, rhs = normal(M, K, dtype=dtype), normal(G, K, N, dtype=dtype)
    assert check(lhs, rhs, SIZES["exact"]).dtype == dtype
    out = check(lhs, rhs, SIZES["exact"], preferred_element_type=np.dtype(np.float32))
    assert out.dtype == jnp.float32
    assert check(lhs, rhs.astype(jnp.float32), SIZES["exact"]).dtype == jnp.float32


def test_float64_matches_the_reference():
    with jax.enable_x64(True):
        check(normal(M, K, dtype=jnp.float64), normal(G, K, N, dtype=jnp.float64), SIZES["exact"])


@pytest.mark.parametrize("shape", [(0, 6, 5, 4), (7, 0, 5, 4), (7, 6, 0, 4), (7, 6, 5, 0)])
def test_empty_axes(shape):
    m, k, n, g = shape
    sizes = np.full(g, 2, np.int32)
    out, grads = pull(normal(m, k), normal(g, k, n), sizes, None, None, normal(m, n))
    assert out.shape == (m, n) and [x.shape for x in grads[:2]] == [(m, k), (g, k, n)]
    if n and k == 0:
        np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize(
    ("stored_as", "scale", "transposed"),
    [
        ("int8", "number", True),
        ("float8_e4m3fn", "group", False),
        ("float8_e5m2", "column", False),
        ("int8", "column", True),
    ],
)
def test_eight_bit_matrices(stored_as, scale, transposed):
    """Rows of nobody; in the last case some of the groups, and something added."""
    given: dict = dict(transposed=transposed, rows=M, cfg={"block_m": 4})
    sizes = [10, 0, 20, 3]
    if transposed and scale == "column":
        sizes = [5, 9, 0, 7, 4, 2]
        given |= dict(offset=2, added=True)
    cases.check_stored(grouped_matmul, stored_as, scale, sizes, (G, K, N), **given)


def test_eight_bit_matrices_of_groups_outside():
    """An offset that reaches past the groups: their rows are 0, whatever the scales are."""
    lhs, rhs, scale = cases.stored("int8", "column", M, (2, K, N), "float32", M)
    scale = scale.at[1].set(jnp.nan)
    out = grouped_matmul(lhs, rhs, jnp.array(SIZES["exact"]), jnp.array(3), rhs_scale=scale)
    scale = scale.at[1].set(0)
    want = oracle.grouped_matmul(lhs, rhs, SIZES["exact"], 3, rhs_scale=scale).out
    check_close(out, want)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_eight_bit_matrices_are_the_numbers_they_stand_for(data):
    """Powers of two as scales round nothing: the same bits as with dequantised matrices."""
    sizes = np.array(data.draw(st.lists(st.integers(0, 20), min_size=G, max_size=G)), np.int32)
    lhs, rhs, scale = cases.stored("int8", "column", M, (G, K, N), "float32", M)
    scale = 2.0 ** np.round(np.log2(scale))
    wide = np.asarray(rhs) * scale[:, None]
    run = jax.jit(grouped_matmul)
    np.testing.assert_array_equal(run(lhs, rhs, sizes, rhs_scale=scale), run(lhs, wide, sizes))


@pytest.mark.parametrize("shape", [(M, K, N), (0, K, N)])
def test_eight_bit_matrices_and_their_scale_have_no_gradient(shape):
    """Nor a silent zero, in either mode; that of lhs alone has all orders."""
    rows, *matrix = shape
    arrays = cases.stored("float8_e4m3fn", "group", rows, (G, *matrix), "float32", rows)

    def run(lhs, rhs, scale):
        out = grouped_matmul(lhs, rhs, np.full(G, 5), rhs_scale=scale)
        return jnp.sum(jnp.sin(out))

    for number, name in enumerate(("lhs", "rhs", "rhs_scale")):
        for transform in (jax.grad, jax.jacfwd):
            jitted = jax.jit(transform(run, number))
            if name == "lhs":
                assert jax.eval_shape(jitted, *arrays).shape == (rows, K)
                continue
            with pytest.raises(
                NotImplementedError, match=f"grouped_matmul: {name}: .* no gradient"
            ):
                jax.eval_shape(jitted, *arrays)


def test_second_gradient_with_eight_bit_matrices():
    """It is the second gradient with dequantised matrices."""
    lhs, rhs, scale = cases.stored("int8", "column", 9, (G, K, N), "float32", 9)
    sizes, wide = np.array([3, 0, 4, 1]), np.asarray(rhs) * scale[:, None]

    def second(lhs, rhs, **options):
        def loss(lhs):
            return jnp.sum(jnp.sin(grouped_matmul(lhs, rhs, sizes, **options)))

        return jax.grad(lambda lhs: jnp.sum(jax.grad(loss)(lhs) ** 2))(lhs)

    run = jax.jit(second)
    np.testing.assert_allclose(run(lhs, rhs, rhs_scale=scale), run(lhs, wide), rtol=2e-3, atol=2e-3)


def test_gradients_keep_the_scales_alone():
    """And not one for every row and column."""
    lhs, rhs, scale = cases.stored("int8", "column", M, (G, K, N), "bfloat16", M)
    _, back = jax.vjp(lambda x: grouped_matmul(x, rhs, np.full(G, 5), rhs_scale=scale), lhs)
    assert all(x.shape != (M, N) for x in jax.tree.leaves(back))


def test_vmap_of_eight_bit_matrices():
    lhs, rhs, scale = cases.stored("int8", "column", M, (G, K, N), "float32", M)
    sizes = np.array([[10, 3, 20, 4], [1, 0, 30, 2]])
    scales = jnp.stack([scale, scale[::-1]])
    run = partial(grouped_matmul, cfg=dict(SMALL))
    got = jax.jit(jax.vmap(lambda s, c: run(lhs, rhs, s, rhs_scale=c)))(sizes, scales)
    for out, s, c in zip(got, sizes, scales, strict=True):
        check_close(out, oracle.grouped_matmul(lhs, rhs, s, rhs_scale=c).out)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data(), m=st.sampled_from([1, 16, 50]), tile=st.sampled_from([3, 16]))
def test_any_sizes(data, m, tile):
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=3, max_size=3))
    check(normal(m, K), normal(3, K, N), sizes, tile=tile)


def dense(lhs, rhs, sizes):
    """Computes the operation by a masked matmul, which JAX alone differentiates."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(lhs.shape[0]), side="right")
    return jnp.einsum("mg,mk,gkn->mn", jax.nn.one_hot(group, rhs.shape[0]), lhs, rhs)


def test_forward_mode_and_second_order():
    lhs, rhs, sizes = normal(9, 3), normal(3, 3, 2), jnp.array([4, 0, 3])

    def loss(product, lhs, rhs):
        return jnp.sum(jnp.sin(product(lhs, rhs, sizes)))

    def ours(lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes, cfg=dict(SMALL))

    tangent = (2 * lhs, normal(*rhs.shape, seed=5))
    got = jax.jvp(lambda a, b: ours(a, b, sizes), (lhs, rhs), tangent)
    want = jax.jvp(lambda a, b: dense(a, b, sizes), (lhs, rhs), tangent)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    want = jax.hessian(partial(loss, dense), (0, 1))(lhs, rhs)
    forward = jax.jit(jax.hessian(partial(loss, ours), (0, 1)))(lhs, rhs)
    reverse = jax.jit(jax.jacrev(jax.grad(partial(loss, ours), (0, 1)), (0, 1)))(lhs, rhs)
    for a, b, c in zip(*map(jax.tree.leaves, (forward, reverse, want)), strict=True):
        np.testing.assert_allclose(a, c, atol=1e-5)
        np.testing.assert_allclose(b, c, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, None, 0), (1, 1, None)])
def test_vmap_matches_single_calls(axes):
    sizes = jnp.array([[10, 3, 20, 4], [1, 0, 30, 2]])
    full = (normal(2, M, K), normal(2, G, K, N), sizes)
    args = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(full, axes, strict=True)
    ]

    def grad(product):
        def loss(lhs, rhs, sizes):
            return jnp.sum(jnp.sin(product(lhs, rhs, sizes)))

        return jax.value_and_grad(loss, (0, 1))

    ours = partial(grouped_matmul, cfg=dict(SMALL))
    got = jax.jit(jax.vmap(grad(ours), axes))(*args)
    want = jax.vmap(grad(dense), axes)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)

    def total(vmapped):
        return lambda lhs, rhs: jnp.sum(jnp.cos(vmapped(lhs, rhs, args[2])))

    got = jax.jit(jax.grad(total(jax.vmap(ours, axes)), (0, 1)))(*args[:2])
    want = jax.grad(total(jax.vmap(dense, axes)), (0, 1))(*args[:2])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_checkpoint_scan_and_shapes():
    lhs, rhs, sizes = normal(M, K), normal(G, K, K), jnp.array(SIZES["rows left"])

    def layers(product):
        def body(x, _):
            return jnp.tanh(product(x, rhs, sizes)), None

        return lambda x: jnp.sum(jax.lax.scan(body, x, None, length=3)[0])

    got = jax.jit(jax.grad(layers(jax.checkpoint(grouped_matmul))))(lhs)
    np.testing.assert_allclose(got, jax.grad(layers(dense))(lhs), atol=1e-5)
    out = jax.eval_shape(grouped_matmul, lhs, rhs, sizes)
    assert (out.shape, out.dtype) == ((M, K), jnp.float32)


def test_shard_map():
    """Rows sharded, matrices replicated: their gradient is summed over the axis."""
    arrays = {"lhs": normal(M, K), "rhs": normal(G, K, N)}
    product = partial(grouped_matmul, group_sizes=jnp.array(SIZES["rows left"]))
    check_shard_map(product, arrays, {"lhs": P("x")}, P("x"))


def test_agrees_with_ragged_dot():
    lhs, rhs, sizes = normal(M, K), normal(G, K, N), jnp.array(SIZES["exact"])
    ours, theirs = grouped_matmul(lhs, rhs, sizes), jax.lax.ragged_dot(lhs, rhs, sizes)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_array_equal(ours, grouped_matmul(lhs, rhs, sizes))


def test_work_follows_the_rows():
    """Nothing of the size of all groups times all rows is ever made."""
    m, k, n, g = 1024, 32, 32, 64
    grad = jax.grad(lambda a, b, s: grouped_matmul(a, b, s).sum(), (0, 1))
    shapes = (normal(m, k), normal(g, k, n), jnp.full(g, 16, jnp.int32))
    used = jax.jit(grad).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    print(f"temporaries {used} bytes; one dense expansion is {4 * g * m * k}")
    assert used < 4 * g * m * k / 8


def test_a_step_has_rows():
    with pytest.raises(ValueError, match="block_m"):
        grouped_matmul(normal(M, K), normal(G, K, N), np.full(G, 2), cfg={"block_m": 0})
