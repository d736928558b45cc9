"""Flash attention on a Hopper GPU at real sizes: values, gradients, repeatability, transforms."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.pallas.gpu.blocksparse_attention.implementation import blocksparse_attention
from ejkernel.kernels.pallas.gpu.common.chip import current_chip
from ejkernel.kernels.pallas.gpu.flash_attention import list_kernel, lists
from ejkernel.kernels.pallas.gpu.flash_attention.implementation import (
    DIMS,
    DTYPES,
    EIGHT_BIT_DIMS,
    flash_attention,
    mla_attention,
)
from ejkernel.kernels.pallas.gpu.serving.implementation import mla_decode
from ejkernel.kernels.pallas.gpu.serving.mla_decode import MAX_SORTED
from ejkernel.kernels.pallas.gpu.serving.mla_split import find_split, find_unit
from ejkernel.ops import batch_invariant
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.serving.split import MAX_FIXED_SPLITS, split_order, split_schedule
from ejktest import at_size, tile_lists
from ejktest.attention import Call
from ejktest.cases import grouped, large_logits, latent
from ejktest.cases.attention import AT_SIZE, SPARSE

pytestmark = pytest.mark.gpu


def supported(call: Call) -> bool:
    fits = (call.d, call.dv or call.d) in DIMS and call.dtypes[0] in DTYPES
    return fits and not (call.bias or call.dropout or call.dense)


def has_lists(call: Call) -> bool:
    return supported(call) and call.pattern.rows % 16 == call.pattern.keys % 16 == 0


NAMES = [name for name, call in AT_SIZE.items() if supported(call)]
LISTED = [name for name, call in SPARSE.items() if has_lists(call)]


@pytest.fixture(autouse=True, scope="module")
def hopper():
    try:
        current_chip()
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def check(hopper, request: pytest.FixtureRequest):
    """The comparison of a case of this run; compilers run side by side."""

    def work(name: str) -> None:
        at_size.check(AT_SIZE[name], flash_attention)

    with at_size.ahead(request, work, 8) as check:
        yield check


@pytest.mark.parametrize("name", NAMES)
def test_against_float32(name: str, check) -> None:
    """o, lse and all gradients; the second run has the same bits."""
    check(name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", EIGHT_BIT_DIMS)
def test_8_bits_against_float32(d: int, causal: bool) -> None:
    at_size.check_eight_bit(flash_attention, d, causal=causal)


@pytest.mark.parametrize("name", LISTED)
def test_lists_against_float32(name: str) -> None:
    """o, lse and all gradients; the second run has the same bits."""
    at_size.check(SPARSE[name], blocksparse_attention)


# a list is read 256 tiles at a time, by warps of 32; the last rows of a launch may be missing
@pytest.mark.parametrize("rows, n", [(2048, 128), (5, 3), (7, 1), (130, 33), (64, 257), (3, 1500)])
def test_lists_from_tiles(rows: int, n: int) -> None:
    rng = np.random.default_rng(n)
    tiles = rng.integers(0, 4, (2, rows, n)) * (rng.random((2, rows, n)) < rng.random((2, rows, 1)))
    tiles[tiles == lists.EVERY] = 0
    tiles = tiles.astype(np.int8)
    walks = [list_kernel.TileBits(jnp.asarray(x[None, None]), i == 0) for i, x in enumerate(tiles)]
    made = list_kernel.make_lists(*walks)
    expected = tile_lists.of_queries(tiles[0]), tile_lists.of_keys(tiles[1])
    for (found, lengths), want, column in zip(made, expected, (1, 0), strict=True):
        np.testing.assert_array_equal(found[0, 0], want)
        np.testing.assert_array_equal(lengths[0, 0], want[:, column])


@pytest.mark.parametrize("groups, places", [(4, 512), (1, 1), (3, 129), (2, 1000)])
def test_tiles_by_length(groups: int, places: int) -> None:
    """A launch of two orders, one of them with slots of its own, some for no tile."""
    rng = np.random.default_rng(places)
    lengths = rng.integers(0, 9, (2, groups, places)).astype(np.int32)
    slots = rng.permutation(groups * places + 137).astype(np.int32)
    orders = [(lengths[0], None), (lengths[1], slots)]
    found = list_kernel.longest_first(*(list_kernel.Lengths(jnp.asarray(x), s) for x, s in orders))
    for x, order in zip(found, orders, strict=True):
        np.testing.assert_array_equal(x, tile_lists.longest_first(*order))


@pytest.mark.parametrize("form", latent.EXPANDED)
def test_latent_attention(form: str) -> None:
    """o and the gradient of every array; the second run has the same bits."""
    latent.check_expanded(form, mla_attention)


@pytest.mark.parametrize("name", [str(case) for case in large_logits.PLAIN])
def test_large_finite_logits_are_numbers(name: str) -> None:
    """o, lse and all gradients."""
    large_logits.check_at_size(large_logits.AT_SIZE[name], flash_attention)


def loss(q, k, v):
    o = flash_attention(q, k, v, causal=True)
    return (o.astype(jnp.float32) ** 2).sum()


grad = jax.grad(loss, (0, 1, 2))


def near(actual, desired) -> None:
    """XLA sums delta in another order in another program: equal up to roundings of bfloat16."""
    desired = np.asarray(desired, np.float32)
    np.testing.assert_allclose(actual, desired, rtol=2**-7, atol=2**-9 * np.abs(desired).max())


def test_vmap_of_grad() -> None:
    x = at_size.small(3)
    mapped = jax.jit(jax.vmap(grad))(*x)
    for i in range(3):
        for a, b in zip(mapped, jax.jit(grad)(*(a[i] for a in x)), strict=True):
            near(np.asarray(a[i], np.float32), b)


def test_checkpoint_and_shard_map() -> None:
    x = at_size.small()
    plain = jax.jit(grad)(*x)
    again = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*x)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = (jax.sharding.PartitionSpec("x"),) * 3
    sharded = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=spec, out_specs=spec))(*x)
    for a, b, c in zip(plain, again, sharded, strict=True):
        near(np.asarray(b, np.float32), a)
        near(np.asarray(c, np.float32), a)


def test_rows_without_keys() -> None:
    """Zero, with lse -inf; no gradient passes through them, sinks included."""
    q, k, v = at_size.small()

    def run(q, sinks):
        o, lse = flash_attention(
            q, k, v, softmax_aux=sinks, causal=True, causal_offset=-100, return_lse=True
        )
        return (o[:, :100].astype(jnp.float32) ** 2).sum(), (o, lse)

    grads, (o, lse) = jax.grad(run, (0, 1), has_aux=True)(q, jnp.ones((4, 1)))
    assert not o[:, :100].any() and bool((lse[:, :100] == -jnp.inf).all())
    assert not any(bool(g.any()) for g in grads)


def test_rows_that_no_list_shows_a_key() -> None:
    """A pattern that hides whole blocks of rows, compared as above."""
    q, k, v = at_size.small()
    pattern = jnp.asarray([[False] * 3, [True] * 3, [False] * 3])

    def run(q, k, v, sinks):
        o, lse = blocksparse_attention(
            q, k, v, softmax_aux=sinks, block_mask=pattern, causal=True, return_lse=True
        )
        return (o.astype(jnp.float32) ** 2).sum(), (o, lse)

    nan = q.at[:, :128].set(jnp.nan).at[:, 256:].set(jnp.nan)
    sinks = jnp.ones((4, 1))
    grads, (o, lse) = jax.grad(run, (0, 1, 2, 3), has_aux=True)(nan, k, v, sinks)
    dead = np.r_[0:128, 256:300]
    assert not o[:, dead].any() and bool((lse[:, dead] == -jnp.inf).all())
    assert not grads[0][:, dead].any()
    assert all(bool(jnp.isfinite(g).all() & g.any()) for g in grads)


LATENT = [
    "128 heads", "float16, rows", "long single", "short single", "e4m3", "int8, float16, 128 heads",
    "e4m3, float16, rows", "e5m2, page 8", "scaled, 64 heads",
]  # fmt: skip


@pytest.mark.parametrize("name", LATENT)
def test_latent_decoding(name: str) -> None:
    """o and lse; two runs have the same bits, and so has one with NaN in unseen memory."""
    latent.check(name, mla_decode)


@pytest.mark.parametrize("heads", [64, 128])
def test_one_sequence_is_merged_as_in_a_batch(heads: int) -> None:
    """Nearly; in batch-invariant calls with the same bits, whether splits are sorted or not."""
    lengths = (0, 1, 1000, 100_001)
    pages = max(lengths) // 64 + 1
    q, cache = (
        jax.random.normal(jax.random.key(n), shape, jnp.bfloat16)
        for n, shape in enumerate([(1, heads, 576), (pages, 64, 576)])
    )
    tables = jax.random.permutation(jax.random.key(2), pages)[None].astype(jnp.int32)

    def outputs(batch: int) -> list[np.ndarray]:
        """Returns the last row of a batch of every length."""
        call = jax.jit(lambda *x: mla_decode(*x, latent_dim=512))
        q_rows, table_rows = (jnp.repeat(x, batch, axis=0) for x in (q, tables))
        rows = [jnp.full(batch, length, jnp.int32) for length in lengths]
        return [np.asarray(call(q_rows, cache, x, table_rows)[-1], np.float32) for x in rows]

    want, single = outputs(2), outputs(1)
    with batch_invariant():
        fixed, *others = (outputs(batch) for batch in (1, 3, MAX_SORTED + 1))
    for i, length in enumerate(lengths):
        assert want[i].any() == (length > 0)
        # twice the bound of a call: probabilities and partial results are rounded elsewhere
        assert at_size.relative(single[i], want[i]) < 1.2e-2
        assert at_size.relative(fixed[i], want[i]) < 1.2e-2
        for other in others:
            np.testing.assert_array_equal(other[i], fixed[i])


SPLIT_LENGTHS = {
    "even": [8192] * 64,
    "uneven": [1, 0, 700, 64, 65, 0, 3000, 63],
    "one": [20000],
    "none": [0, -3, 0],
    "empty ends": [0, 0, 130, 0],
    "many": [i % 97 for i in range(200)],
    "more than lanes hold": [i * i % 1009 for i in range(3000)],
}


def run_units(body: Callable[..., None], lengths: jax.Array, shape: tuple[int, int]) -> np.ndarray:
    """Returns the int32 array that ``body(lengths, out)`` writes, a program for each line."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.int32),
        grid=shape[:1],
        grid_names=("unit",),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    return np.asarray(jax.jit(kernel)(lengths))


@pytest.mark.parametrize("name", [n for n, x in SPLIT_LENGTHS.items() if len(x) <= 200])
def test_every_program_finds_the_fixed_split_of_the_reference(name: str) -> None:
    order = split_order(np.asarray(SPLIT_LENGTHS[name]), 64)
    lengths, units = jnp.asarray(SPLIT_LENGTHS[name], jnp.int32), len(order) + 2

    def body(lengths, out):
        unit = jax.lax.axis_index("unit")
        for i, x in enumerate(find_split(lengths, unit, step=64, capacity=10**6)):
            out[unit, i] = x

    found = run_units(body, lengths, (units, 2))
    np.testing.assert_array_equal(found[:-2], order)
    assert (found[-2:, 1] == MAX_FIXED_SPLITS).all()


@pytest.mark.parametrize("units", [1, 66])
@pytest.mark.parametrize("name", SPLIT_LENGTHS)
def test_every_program_finds_the_unit_of_the_reference(name: str, units: int) -> None:
    lengths = jnp.asarray(SPLIT_LENGTHS[name], jnp.int32)

    def body(lengths, out):
        unit = jax.lax.axis_index("unit")
        *found, cut = find_unit(lengths, unit, units=units, step=64, capacity=10**6)
        for i, x in enumerate((*found, *cut)):
            out[unit, i] = x

    got = run_units(body, lengths, (units, 7))
    schedule = split_schedule(np.asarray(SPLIT_LENGTHS[name]), units, 64)
    for found, unit in zip(got, schedule, strict=True):
        assert found[2] == unit.steps and found[5] == unit.cut.partials
        if unit.steps:
            np.testing.assert_array_equal(found[:2], unit[:2])
        if unit.cut.partials:
            np.testing.assert_array_equal(found[3:], unit.cut)


@pytest.fixture(scope="module")
def grouped_matmul():
    pytest.importorskip("ejkernel.kernels.triton", reason="it does the rest of the work")
    from ejkernel.kernels.pallas.gpu.grouped_matmul.implementation import grouped_matmul

    return grouped_matmul


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", grouped.ALIGNED)
def test_grouped_matrices(kind: str, transposed: bool, grouped_matmul) -> None:
    """The gradient of matrices, against float64, groups around the size of a tile among them."""
    for sizes in grouped.SIZES:
        rows = 384 if sizes == "one group" else 392
        found = grouped.errors(grouped_matmul, sizes, kind, transposed, rows=rows)
        assert max(found.values()) <= grouped.ALIGNED[kind][-1], (sizes, found)


@pytest.mark.parametrize("zipf", [False, True])
@pytest.mark.parametrize("name", grouped.AT_SIZE)
def test_grouped_matrices_of_models(name: str, zipf: bool, grouped_matmul) -> None:
    """Values, both gradients, and the bits of a second run."""
    grouped.check_at_size(grouped_matmul, name, zipf)


@pytest.mark.parametrize("case", grouped.ALIGNED_STORED)
def test_grouped_matrices_of_8_bits(case: str, grouped_matmul) -> None:
    """The result and the gradient of the rows, against float64."""
    grouped.check_aligned_stored(grouped_matmul, case)


def test_grouped_matrices_of_8_bits_of_models(grouped_matmul) -> None:
    """Results equal the results with the same matrices in 16 bits, and repeat in a second run."""
    groups, rows, inner, columns = grouped.AT_SIZE["mixtral"]
    sizes = jnp.asarray(grouped.sizes_at("mixtral", zipf=True))
    a, b, c = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(a, (rows, inner), jnp.bfloat16)
    rhs = jax.random.randint(b, (groups, inner, columns), -128, 128, jnp.int8)
    dout = jax.random.normal(c, (rows, columns), jnp.bfloat16)

    @jax.jit
    def run(rhs):
        out, back = jax.vjp(lambda lhs: grouped_matmul(lhs, rhs, sizes), lhs)
        return out, *back(dout)

    found, again, want = run(rhs), run(rhs), run(rhs.astype(jnp.bfloat16))
    for x, same, y in zip(found, again, want, strict=True):
        np.testing.assert_array_equal(x, same)
        x, y = (z.astype(jnp.float32) for z in (x, y))
        # the order of additions differs: rarely a neighbouring number
        assert jnp.linalg.norm(x - y) <= 1e-3 * jnp.linalg.norm(y)


@pytest.mark.parametrize("shared", [True, False])
def test_mapped_grouped_matrices_of_8_bits_have_the_same_bits(shared: bool, grouped_matmul) -> None:
    a, b, c = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(a, (2, 704, 256), jnp.bfloat16)
    dout = jax.random.normal(c, (2, 704, 512), jnp.bfloat16)
    rhs = jax.random.randint(b, (2, 5, 256, 512), -128, 128, jnp.int8)
    scale = jnp.linspace(0.5, 1.5, 2 * 5 * 512).reshape(2, 5, 512)
    sizes = jnp.array([[130, 0, 64, 300, 100], [1, 699, 0, 0, 0]])

    def pull(lhs, rhs, scale, sizes, dout):
        def run(lhs):
            return grouped_matmul(lhs, rhs, sizes, rhs_scale=scale)

        out, back = jax.vjp(run, lhs)
        return out, *back(dout)

    arrays = [lhs, rhs, scale, sizes, dout]
    axes = [0, 0, 0, 0, 0]
    if shared:
        arrays[1:3], axes[1:3] = (rhs[0], scale[0]), (None, None)
    mapped = jax.jit(jax.vmap(pull, axes))(*arrays)
    for i in range(2):
        call = [x if axis is None else x[i] for x, axis in zip(arrays, axes, strict=True)]
        for x, y in zip(mapped, jax.jit(pull)(*call), strict=True):
            np.testing.assert_array_equal(x[i], y)


def test_mapped_grouped_matrices_have_the_same_bits(grouped_matmul) -> None:
    a, b, c = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(a, (2, 704, 256), jnp.bfloat16)
    dout = jax.random.normal(c, (2, 704, 512), jnp.bfloat16)
    rhs = jax.random.normal(b, (5, 256, 512), jnp.bfloat16)
    sizes = jnp.array([[130, 0, 64, 300, 100], [1, 699, 0, 0, 0]])

    def pull(lhs, sizes, dout):
        return jax.vjp(lambda rhs: grouped_matmul(lhs, rhs, sizes), rhs)[1](dout)[0]

    mapped = jax.jit(jax.vmap(pull))(lhs, sizes, dout)
    for i in range(2):
        np.testing.assert_array_equal(mapped[i], jax.jit(pull)(lhs[i], sizes[i], dout[i]))
