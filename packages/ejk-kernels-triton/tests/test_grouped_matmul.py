"""Grouped matrix products through Triton's interpreter, against a float64 loop over the groups."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.triton import grouped_matmul
from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.common.precision import precision_name
from ejkernel.kernels.triton.grouped_matmul import launch, tiles
from ejkernel.kernels.triton.grouped_matmul.backward_rhs import GroupedDrhs
from ejkernel.kernels.triton.targets import compile_for, cuda_target, rocm_target
from ejkernel.ops import interpret_mode
from ejkernel.types import InvalidArgument
from ejkernel.types.masks.structure import Unsupported
from ejktest.cases import grouped as cases
from ejktest.drawn import array
from ejktest.oracles import grouped as oracle
from ejktest.programs import sizes_of
from ejktest.tolerance import check_close
from ejktest.transforms import check_shard_map

pytest.importorskip("triton")

M, K, N, G = 52, 32, 40, 4
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16}


@pytest.fixture(autouse=True)
def few_programs():
    """A chip of three multiprocessors: programs have tiles of several groups."""
    with interpret_mode(), compile_for(cuda_target(90, 3)):
        yield


def normal(*shape, seed=0, dtype=jnp.float32):
    return array(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def narrower(a, b):
    return min(a.dtype, b.dtype, key=lambda d: d.itemsize)


def check(lhs, rhs, sizes, offset=None, existing=None, *, cfg=SMALL, **options):
    """The result and all gradients, everything but options traced."""
    n = rhs.shape[1 if options.get("transpose_rhs") else 2]
    dout = normal(lhs.shape[0], n, seed=7)
    sizes = np.asarray(sizes, np.int32)

    @jax.jit
    def pull(lhs, rhs, sizes, offset, existing, dout):
        def run(lhs, rhs, existing):
            return grouped_matmul(lhs, rhs, sizes, offset, existing, cfg=cfg, **options)

        out, back = jax.vjp(run, lhs, rhs, existing)
        return out, back(dout.astype(out.dtype))

    out, (dlhs, drhs, dexisting) = pull(lhs, rhs, sizes, offset, existing, dout)
    oracle_options = {n: x for n, x in options.items() if n == "transpose_rhs"}
    want = oracle.grouped_matmul(
        lhs, rhs, sizes, offset, existing, dout=dout.astype(out.dtype), **oracle_options
    )
    check_close(out, want.out, name="out")
    check_close(dlhs, want.dlhs, dtype=narrower(dlhs, out), name="dlhs")
    check_close(drhs, want.drhs, dtype=narrower(drhs, out), name="drhs")
    assert (dlhs.dtype, drhs.dtype) == (lhs.dtype, rhs.dtype)
    if existing is not None:
        np.testing.assert_array_equal(dexisting, dout.astype(out.dtype).astype(existing.dtype))
    return out


SIZES = {
    "around a tile": [15, 16, 17, 1],
    "rows left": [10, 0, 20, 3],
    "too many": [10, 20, 30, 40],
    "empty at both ends": [0, 1, 51, 0],
    "none": [0, 0, 0, 0],
    "one": [0, 0, 52, 0],
    "huge": [2**31 - 1, 2**31 - 1, 5, 2**31 - 1],
    "negative": [20, -5, 12, -(2**31)],
}


@pytest.mark.parametrize("sizes", SIZES)
def test_group_sizes_match_the_reference(sizes):
    given = [max(n, 0) for n in SIZES[sizes]]
    check(normal(M, K), normal(G, K, N), given)
    if given != SIZES[sizes]:
        args = normal(M, K), normal(G, K, N)
        got = grouped_matmul(*args, jnp.array(SIZES[sizes], np.int32), cfg=SMALL)
        np.testing.assert_array_equal(got, grouped_matmul(*args, np.array(given), cfg=SMALL))


@pytest.mark.parametrize("inner", [K, 24, 21])
def test_transposed_and_read_by_both_ways(inner):
    """32 columns go through descriptors; 24 only in the gradient; rows of 21 are never 16 bytes."""
    check(normal(M, inner), normal(G, N, inner), SIZES["rows left"], transpose_rhs=True)
    check(normal(M, inner), normal(G, inner, N), SIZES["around a tile"])


@pytest.mark.parametrize("target", [cuda_target(80, 2), rocm_target("gfx942", 2)])
def test_other_chips(target):
    with compile_for(target):
        check(normal(M, K), normal(G, K, N), SIZES["around a tile"], cfg=None)


def test_offsets_compose():
    """Two halves of the groups, one call after the other, are the whole."""
    lhs, rhs, sizes = normal(M, K), normal(G, K, N), SIZES["around a tile"]
    existing = normal(M, N, seed=3)
    first = check(lhs, rhs[:2], sizes, jnp.array(0), existing)
    both = check(lhs, rhs[2:], sizes, jnp.array([2]), first)
    check_close(both, oracle.grouped_matmul(lhs, rhs, sizes, existing_out=existing).out)
    np.testing.assert_array_equal(
        grouped_matmul(lhs, rhs[2:], np.array(sizes), 2, first, cfg=SMALL), both
    )


@pytest.mark.parametrize("offset", [3, 9, -3, 2**31 - 1])
def test_offset_past_the_groups(offset):
    """A traced offset that reaches past the groups gives nothing there, and no gradient."""
    lhs, rhs, sizes = normal(M, K), normal(2, K, N), np.array(SIZES["around a tile"])
    run = jax.jit(partial(grouped_matmul, cfg=SMALL))
    out, back = jax.vjp(lambda lhs, rhs: run(lhs, rhs, sizes, jnp.array(offset)), lhs, rhs)
    dout = normal(M, N, seed=5)
    want = oracle.grouped_matmul(lhs, rhs, sizes, offset, dout=dout)
    for got, exact in zip((out, *back(dout)), want, strict=True):
        check_close(got, exact)


def test_rows_of_others_may_hold_anything():
    """NaN behind the groups touches nothing; a group's NaN stays in its own matrix."""
    sizes, dout = np.array([10, 0, 20, 3]), normal(M, N, seed=7)

    @jax.jit
    def pull(lhs, dout):
        run = partial(grouped_matmul, group_sizes=sizes, cfg=SMALL)
        out, back = jax.vjp(lambda lhs, rhs: run(lhs, rhs), lhs, normal(G, K, N))
        return out, *back(dout)

    clean = pull(normal(M, K), dout)
    for lhs, cotangent in (
        (normal(M, K).at[33:].set(jnp.nan), dout),
        (normal(M, K), dout.at[33:].set(jnp.inf)),
    ):
        for got, want in zip(pull(lhs, cotangent), clean, strict=True):
            np.testing.assert_array_equal(got, want)
    _, _, drhs = pull(normal(M, K).at[10:30].set(jnp.nan), dout.at[10:30].set(jnp.inf))
    np.testing.assert_array_equal(drhs[jnp.array([0, 1, 3])], clean[2][jnp.array([0, 1, 3])])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_dtypes_match_the_reference(dtype):
    lhs, rhs = normal(M, K, dtype=dtype), normal(G, K, N, dtype=dtype)
    existing = normal(M, N, seed=3)
    assert check(lhs, rhs, SIZES["around a tile"], None, existing).dtype == dtype
    out = check(lhs, rhs, SIZES["rows left"], preferred_element_type=np.dtype(np.float32))
    assert out.dtype == jnp.float32
    assert check(lhs, rhs.astype(jnp.float32), SIZES["rows left"]).dtype == jnp.float32


def test_a_half_that_leaves_late_is_the_same():
    """Tiles of one step and of many, and matrices without rows; each call has its offset."""
    p = problem(36, 16, 32, 3)
    late = tiles.Tiles(16, 32, 16, 4, 3, parts=2, late=True)
    lhs, dout = normal(2, 36, 16, dtype=jnp.bfloat16), normal(2, 36, 32, dtype=jnp.bfloat16)
    sizes, offset = np.array([[15, 0, 20], [3, 33, 0]]), jnp.array([[0], [1]])

    def drhs(lhs, dout, sizes, offset):
        operands = {"lhs": lhs, "dout": dout, "group_sizes": sizes, "offset": offset}
        return call(GroupedDrhs(p, late), **operands)["out"]

    got = jax.vmap(drhs)(lhs, dout, jnp.asarray(sizes), offset)
    for i in range(2):
        want = oracle.grouped_matmul(
            lhs[i], np.zeros((3, 16, 32)), sizes[i], i, dout=dout[i]
        ).drhs  # fmt: skip
        check_close(got[i], want)


@pytest.mark.parametrize(
    ("target", "stored_as", "scale", "matrices", "transposed", "dtype"),
    [
        (cuda_target(90, 3), "int8", "column", (G, K, N), False, "bfloat16"),
        (cuda_target(90, 3), "float8_e4m3fn", "group", (G, K, 48), False, "bfloat16"),
        (cuda_target(90, 3), "float8_e5m2", "number", (G, K, 48), True, "float32"),
        (cuda_target(80, 2), "float8_e4m3fn", "column", (G, 22, 10), True, "float16"),
        (rocm_target("gfx942", 2), "int8", "group", (G, 21, 10), False, "bfloat16"),
    ],
)
def test_eight_bit_matrices(target, stored_as, scale, matrices, transposed, dtype):
    """By descriptors where rows of matrices are whole 16 bytes; some of the groups, rows left."""
    given: dict = dict(offset=1, added=True, transposed=transposed, dtype=dtype, rows=M)
    with compile_for(target):
        cases.check_stored(
            grouped_matmul, stored_as, scale, [3, 15, 0, 17, 1, 2], matrices, **given
        )  # fmt: skip


def test_eight_bit_matrices_mapped():
    """Matrices and scales go together: of one call, or one for all."""
    lhs, rhs, scale = cases.stored("int8", "column", M, (G, K, N), "float32", M)
    sizes = np.array([[10, 3, 20, 4], [1, 0, 30, 2]])
    scales = jnp.stack([scale, scale[::-1]])
    run = partial(grouped_matmul, cfg=SMALL)
    got = jax.vmap(lambda s, c: run(lhs, rhs, s, rhs_scale=c))(sizes, scales)
    shared = jax.vmap(lambda s: run(lhs, rhs, s, rhs_scale=scale))(sizes)
    np.testing.assert_array_equal(shared[0], got[0])
    for out, s, c in zip(got, sizes, scales, strict=True):
        check_close(out, oracle.grouped_matmul(lhs, rhs, s, rhs_scale=c).out)


def test_gradient_with_eight_bit_matrices_mapped():
    """Calls with their own scales, or sizes, or offset."""
    lhs, rhs, scale = cases.stored("int8", "column", M, (G, K, N), "float32", M)
    lhs, dout = normal(M, K), normal(2, M, N, seed=5)
    sizes, offsets = np.array([[10, 3, 20, 4, 2], [1, 0, 30, 2, 4]]), jnp.array([0, 1])
    scales = jnp.stack([scale, scale[::-1]])

    def gradient(dout, sizes, offset, scale):
        run = partial(grouped_matmul, cfg=SMALL, rhs_scale=scale)
        return jax.vjp(lambda lhs: run(lhs, rhs, sizes, offset), lhs)[1](dout)[0]

    got = jax.jit(jax.vmap(gradient))(dout, sizes, offsets, scales)
    shared = jax.jit(jax.vmap(gradient, (0, 0, 0, None)))(dout, sizes, offsets, scale)
    np.testing.assert_array_equal(shared[0], got[0])
    for i in range(2):
        want = oracle.grouped_matmul(
            lhs, rhs, sizes[i], offsets[i], rhs_scale=scales[i], dout=dout[i]
        ).dlhs
        check_close(got[i], want)


def test_eight_bit_matrices_and_their_scale_have_no_gradient():
    arrays = cases.stored("float8_e4m3fn", "group", M, (G, K, N), "float32", M)

    def loss(lhs, rhs, scale):
        return jnp.sum(jnp.sin(grouped_matmul(lhs, rhs, np.full(G, 5), rhs_scale=scale)))

    for number, name in ((1, "rhs"), (2, "rhs_scale")):
        with pytest.raises(NotImplementedError, match=f"grouped_matmul: {name}: .* no gradient"):
            jax.eval_shape(jax.grad(loss, number), *arrays)
    with pytest.raises(NotImplementedError, match="grouped_matmul is differentiable once"):
        jax.eval_shape(jax.hessian(loss), *arrays)


@pytest.mark.parametrize("factor", [1e-4, 1e3, 0.0])
def test_scales_of_columns_leave_no_gradient_out_of_the_range_of_float16(factor):
    """The cotangent of a column times its scale may be too small, or too large, for it."""
    lhs, rhs, scale = cases.stored("int8", "column", M, (G, K, N), "float16", M)
    sizes, scale = np.array(SIZES["around a tile"]), scale * 10 * factor
    dout = normal(M, N, seed=5, dtype="float16") * np.float16(0.01 if factor < 1 else 1e-5)

    @jax.jit
    def gradient(lhs, scale, dout):
        run = partial(grouped_matmul, cfg=SMALL, rhs_scale=scale)
        return jax.vjp(lambda lhs: run(lhs, rhs, sizes), lhs)[1](dout)[0]

    want = oracle.grouped_matmul(lhs, rhs, sizes, rhs_scale=scale, dout=dout).dlhs
    check_close(gradient(lhs, scale, dout), want)


@pytest.mark.parametrize("shape", [(0, 6, 5, 4), (7, 0, 5, 4), (7, 6, 0, 4), (7, 6, 5, 0)])
def test_empty_axes(shape):
    m, k, n, g = shape
    existing = normal(m, n, seed=2)

    def run(lhs, rhs, existing):
        return grouped_matmul(lhs, rhs, np.full(g, 2), None, existing)

    out, back = jax.vjp(run, normal(m, k), normal(g, k, n), existing)
    np.testing.assert_array_equal(out, existing)
    assert [x.shape for x in back(out)] == [(m, k), (g, k, n), (m, n)]


def dense(lhs, rhs, sizes, offset=None, existing=None):
    """Computes the operation by a masked matmul, which JAX alone differentiates."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(lhs.shape[0]), side="right")
    group = group - (0 if offset is None else offset)
    out = jnp.einsum("mg,mk,gkn->mn", jax.nn.one_hot(group, rhs.shape[0]), lhs, rhs)
    return out if existing is None else out + existing


def mapped(product, axes):
    def loss(*args):
        return jnp.sum(jnp.sin(product(*args)))

    return jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1)), axes))


@pytest.mark.parametrize(
    ("axes", "most"),
    [
        ((0, None, 0, None, 0), tiles.MAX_LANES),
        ((1, 1, None, None, None), tiles.MAX_LANES),
        ((None, None, 0, 0, None), tiles.MAX_LANES),
        ((0, None, 0, 0, None), 8),
    ],
)
def test_vmap_matches_single_calls(axes, most, monkeypatch):
    """Folded into one launch, or with too many groups for one, call after call."""
    monkeypatch.setattr(launch, "MAX_LANES", most)
    sizes = jnp.array([[10, 3, 20, 4], [1, 0, 70, 2]])
    full = (normal(2, M, K), normal(2, 3, K, N), sizes, jnp.array([0, 1]), normal(2, M, N, seed=4))
    args = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(full, axes, strict=True)
    ]
    got = mapped(partial(grouped_matmul, cfg=SMALL), axes)(*args)
    want = mapped(dense, axes)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-5)


def test_vmap_of_vmap():
    lhs, rhs = normal(2, 3, 20, K), normal(3, G, K, N)
    sizes = jnp.array([[[5, 3, 4, 8], [0, 0, 9, 1], [20, 1, 1, 1]]] * 2)
    ours, theirs = (
        jax.jit(jax.vmap(jax.vmap(product), (0, None, 0)))
        for product in (partial(grouped_matmul, cfg=SMALL), dense)
    )
    want = theirs(lhs, rhs, sizes)
    np.testing.assert_allclose(ours(lhs, rhs, sizes), want, atol=1e-4)
    # an inner axis of one call
    one = ours(lhs[:, :1], rhs[:1], sizes[:, :1])
    np.testing.assert_allclose(one, want[:, :1], atol=1e-4)


def test_scan_checkpoint_and_repeatability():
    lhs, rhs, sizes = normal(M, K), normal(G, K, K), jnp.array(SIZES["rows left"])

    def layers(product):
        def body(x, _):
            return jnp.tanh(product(x, rhs, sizes)), None

        return lambda x: jnp.sum(jax.lax.scan(body, x, None, length=2)[0])

    ours = jax.jit(jax.grad(layers(jax.checkpoint(partial(grouped_matmul, cfg=SMALL)))))
    got = ours(lhs)
    np.testing.assert_array_equal(got, ours(lhs))
    np.testing.assert_allclose(got, jax.jit(jax.grad(layers(dense)))(lhs), atol=1e-4)


def test_shard_map():
    """Rows sharded, matrices replicated: their gradient is summed over the axis."""
    arrays = {"lhs": normal(M, K), "rhs": normal(G, K, N)}
    product = partial(grouped_matmul, group_sizes=jnp.array(SIZES["rows left"]), cfg=SMALL)
    check_shard_map(product, arrays, {"lhs": P("x")}, P("x"))


def test_nothing_is_larger_than_operands_and_results():
    """The result and both gradients: no memory that grows with groups times rows."""
    lhs, rhs = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 512), (64, 512, 1024)))

    def run(lhs, rhs, sizes):
        out, back = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes), lhs, rhs)
        return out, *back(out)

    program = jax.make_jaxpr(run)(lhs, rhs, jax.ShapeDtypeStruct((64,), jnp.int32))
    assert max(sizes_of(program.jaxpr)) == 2 * rhs.size


def test_config_changes_rounding_only():
    args = normal(M, K), normal(G, K, N), np.array(SIZES["around a tile"])
    base = grouped_matmul(*args)
    for cfg in (SMALL, {"block_m": 32, "block_k": 64, "num_warps": 8, "num_stages": 2}):
        np.testing.assert_allclose(grouped_matmul(*args, cfg=cfg), base, atol=1e-5)


def problem(m, k, n, g, dtype="bfloat16", **fields):
    return tiles.Problem(m, k, n, g, g, False, dtype, dtype, "tf32", **fields)


@pytest.mark.parametrize("shape", [(16384, 4096, 14336, 8), (65536, 7168, 2048, 256),
                                   (8192, 2048, 768, 128), (100, 30, 20, 3)])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_fit(shape, dtype):
    p = problem(*shape, dtype=dtype)
    for target in (cuda_target(90), cuda_target(80, 108), cuda_target(89, 128)):
        for t in (tiles.choose(p, target), tiles.choose_weights(p, target)):
            assert tiles.shared_bytes(p, t) * t.per_core <= target.shared_limit + 1024
        found = tiles.neighbours(p, target)
        assert found[0] == tiles.choose(p, target)
        assert 3 <= len(found) == len(set(found)) <= 20


def test_sums_of_sizes_are_wide_where_they_must_be():
    assert not problem(65536, 8, 8, 256).wide
    assert problem(2**24, 8, 8, 256).wide
    assert problem(2**20, 8, 8, 15, batch=16).wide


def test_precision_in_tritons_words():
    name = precision_name
    assert [name(p, "float32") for p in (None, "default", "high", jax.lax.Precision.HIGHEST)] == [
        "tf32", "tf32", "tf32x3", "ieee",
    ]  # fmt: skip
    assert name(("default", "highest"), "float32") == "ieee"
    assert name("BF16_BF16_F32", "float32") == ""
    assert name("highest", "bfloat16") == name(None, "bfloat16")  # no operand to be cut


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        (dict(rhs=np.zeros((G, N, K), np.float32)), InvalidArgument, "rhs"),
        (dict(preferred_element_type=np.float64), Unsupported, "preferred_element_type"),
        (dict(precision="BF16_BF16_F32"), Unsupported, "precision"),
        (dict(group_sizes=np.zeros(4096, int), group_offset=0), Unsupported, "group_sizes"),
        (dict(rhs=np.zeros((G, K, 7), np.int8)), Unsupported, "rhs: 8-bit .* last axis 7 is odd"),
    ],
)
def test_unsupported_calls_are_refused(change, error, name):
    right = dict(lhs=normal(M, K), rhs=normal(G, K, N), group_sizes=np.full(G, 2))
    with pytest.raises(error, match=name):
        grouped_matmul(**{**right, **change})


def test_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        check(normal(M, K, dtype=jnp.bfloat16), normal(G, K, N), SIZES["rows left"], jnp.array(0))
