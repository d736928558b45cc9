"""Bits of a sequence's output and gradients in every batch: alone, with others, in any order."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejkernel.ops import KernelNotSupported, batch_invariant, interpret_mode, kernel_registry
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.problem import LatentProblem, PagedProblem, RaggedProblem

COMPOSITIONS = ([0], [2, 1], [4, 0, 3, 1, 2], [1, 3, 0], [2], [3, 4, 0, 1, 2, 0, 1])
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 8
LENGTHS = (3, 40, 17, 90, 64)
NEW = (1, 5, 12, 1, 2)  # tokens of a ragged call


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def stacked(name):
    """Arguments by name, an entry of the first axis for each of five sequences, and the rest."""
    q, k, v = draw(5, 48, HEADS, DIM), draw(5, 48, KV_HEADS, DIM), draw(5, 48, KV_HEADS, DIM)
    qkv = {"query": q, "key": k, "value": v}
    linear = qkv | {"key": draw(5, 48, HEADS, DIM), "value": draw(5, 48, HEADS, DIM, seed=1)}
    return {
        "flash_attention": (qkv, {"causal": True, "sliding_window": 20}),
        "recurrent_attention": (linear | {"g": -jnp.abs(draw(5, 48, HEADS, seed=2))}, {}),
        "gated_delta_rule": (
            linear | {"key": linear["key"], "g": -jnp.abs(draw(5, 48, HEADS, seed=2))},
            {"normalize_qk": True},
        ),
        "causal_conv1d": ({"x": draw(5, 48, 32)}, {"weight": draw(32, 4, seed=3)}),
        "mean_pooling": ({"x": draw(5, 48, 32)}, {}),
    }[name]


DENSE = (
    "flash_attention",
    "recurrent_attention",
    "gated_delta_rule",
    "causal_conv1d",
    "mean_pooling",
)


def dense_results(name, platform, composition):
    arrays, others = stacked(name)
    rows = {n: x[np.array(composition)] for n, x in arrays.items()}
    operation = partial(getattr(modules, name), platform=platform, **others)
    out, pull = jax.vjp(lambda rows: operation(**rows), rows)
    gradients = pull(jnp.cos(out))[0]
    return [out, *gradients.values()]


def paged_arguments(count, extra):
    """Pages of these sequences at random places of a cache, behind tables of random width."""
    rng = np.random.default_rng(count)
    width = -(-max(LENGTHS) // PAGE) + extra
    pages = count * width + int(rng.integers(0, 9))
    places = rng.permutation(pages)[: count * width].reshape(-1, width)
    return rng, pages, places


def paged_results(name, platform, composition):
    keys, values = draw(5, 96, KV_HEADS, DIM, seed=4), draw(5, 96, KV_HEADS, DIM, seed=5)
    count = len(composition)
    rng, pages, places = paged_arguments(count, count % 3)
    caches = [np.full((pages, PAGE, KV_HEADS, DIM), np.nan, np.float32) for _ in range(2)]
    for place, i in zip(places, composition, strict=True):
        for cache, x in zip(caches, (keys, values), strict=True):
            whole = -(-LENGTHS[i] // PAGE)
            rows = np.asarray(x[i, : whole * PAGE])
            cache[place[:whole]] = rows.reshape(whole, PAGE, KV_HEADS, DIM)
    lens = np.array([LENGTHS[i] for i in composition], np.int32)
    tables = places.astype(np.int32)
    if name == "page_attention":
        query = draw(5, HEADS, DIM)[np.array(composition)]
        operation = partial(modules.page_attention, platform=platform, return_lse=True)
        return operation(query, *caches, lens, tables)
    if name == "mla_decode":
        query = draw(5, HEADS, 2 * DIM)[np.array(composition)]
        cache = np.concatenate([caches[0][:, :, 0], caches[1][:, :, 0]], -1)
        return [modules.mla_decode(query, cache, lens, tables, latent_dim=DIM, platform=platform)]
    new = np.array([NEW[i] for i in composition])
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    queries = np.concatenate([draw(12, HEADS, DIM, seed=i)[: NEW[i]] for i in composition])
    queries = np.concatenate([queries, np.zeros((int(rng.integers(0, 4)), HEADS, DIM), np.float32)])
    pages = np.stack([caches[0], caches[1]], 3).reshape(pages, PAGE, 2 * KV_HEADS, DIM)
    operation = partial(modules.ragged_page_attention, platform=platform)
    out = operation(queries, pages, lens, tables, starts, np.array([count], np.int32))
    longest = max(NEW)
    rows = [np.asarray(out)[a:b] for a, b in itertools.pairwise(starts)]
    return [np.stack([np.pad(r, ((0, longest - len(r)), (0, 0), (0, 0))) for r in rows])]


def expected_paged(name):
    """Returns the outputs of each sequence as ``paged_results`` has them, in float64."""
    keys, values = (np.asarray(draw(5, 96, KV_HEADS, DIM, seed=s), np.float64) for s in (4, 5))
    rows = []
    for i, length in enumerate(LENGTHS):
        k, v = keys[i, :length], values[i, :length]
        if name == "mla_decode":
            q = np.asarray(draw(5, HEADS, 2 * DIM)[i : i + 1], np.float64)
            k, v = np.concatenate([k[:, :1], v[:, :1]], -1), k[:, :1]
        elif name == "page_attention":
            q = np.asarray(draw(5, HEADS, DIM)[i : i + 1], np.float64)
        else:
            q = np.asarray(draw(12, HEADS, DIM, seed=i)[: NEW[i]], np.float64)
        k, v = (np.repeat(x, HEADS // x.shape[1], axis=1) for x in (k, v))
        x = np.einsum("qhd,khd->qhk", q, k) * q.shape[-1] ** -0.5
        hidden = np.arange(length) > length - len(q) + np.arange(len(q))[:, None]
        p = np.exp(np.where(hidden[:, None], -np.inf, x))
        rows.append(np.einsum("qhk,khd->qhd", p / p.sum(-1, keepdims=True), v))
    longest = max(map(len, rows))
    return np.stack([np.pad(r, ((0, longest - len(r)), (0, 0), (0, 0))) for r in rows])


@pytest.mark.parametrize("name", ["page_attention", "mla_decode", "ragged_page_attention"])
def test_values_of_interpreted_triton(name):
    with interpret_mode(), batch_invariant():
        out = paged_results(name, "triton", list(COMPOSITIONS[2]))[0]
    expected = expected_paged(name)[list(COMPOSITIONS[2])].reshape(out.shape)
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_values_of_xla():
    for name in DENSE:
        default = dense_results(name, "xla", [2, 0, 1])
        with batch_invariant():
            ours = dense_results(name, "xla", [2, 0, 1])
        for a, b in zip(ours, default, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def check(results):
    alone = {}
    for composition in COMPOSITIONS:
        with batch_invariant():
            outputs = results(composition)
        for x in outputs:
            assert np.isfinite(np.asarray(x)).all()
        for row, i in enumerate(composition):
            bits = [np.asarray(x)[row].tobytes() for x in outputs]
            assert alone.setdefault(i, bits) == bits, (composition, row)


@pytest.mark.parametrize("name", DENSE)
def test_rows_of_xla(name):
    check(partial(dense_results, name, "xla"))


def test_a_zero_keeps_its_sign_in_any_batch():
    x = draw(2, 8, 4)

    def gradient(rows):
        with batch_invariant():
            out, pull = jax.vjp(modules.mean_pooling, x[rows])
            return np.asarray(pull(jnp.full_like(out, -0.0))[0])

    alone, pair = gradient(np.array([0])), gradient(np.array([0, 1]))
    assert np.signbit(pair).all()  # else this could not fail
    assert alone.tobytes() == pair[:1].tobytes()


@pytest.mark.parametrize("name", ["page_attention", "mla_decode"])
def test_paged_sequences_of_xla(name):
    check(partial(paged_results, name, "xla"))


@pytest.mark.parametrize("name", ["page_attention", "mla_decode", "ragged_page_attention"])
def test_paged_sequences_of_interpreted_triton(name):
    with interpret_mode():
        check(partial(paged_results, name, "triton"))


def grouped_results(platform, composition):
    """Rows of five groups; a composition says how many of them stand in a call, and where."""
    counts = np.bincount(composition, minlength=5)
    order = np.repeat(np.arange(5), counts)
    rows = {"lhs": draw(5, 64)[order], "rhs": draw(5, 64, 48, seed=1)}
    operation = partial(modules.grouped_matmul, platform=platform)
    sizes = counts.astype(np.int32)
    out, pull = jax.vjp(lambda lhs: operation(lhs, rows["rhs"], sizes), rows["lhs"])
    first = np.concatenate([[0], np.cumsum(counts)])[np.array(composition)]
    return [out[first], pull(jnp.cos(out))[0][first]]


def on_a_gpu():
    """Functions of a composition, by name."""
    results = {name: partial(dense_results, name, "triton") for name in DENSE}
    paged = ("page_attention", "mla_decode", "ragged_page_attention")
    results |= {name: partial(paged_results, name, "triton") for name in paged}
    return results | {"grouped_matmul": partial(grouped_results, "triton")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(on_a_gpu()))
def test_sequences_on_a_gpu(name):
    check(on_a_gpu()[name])


def test_groups_of_interpreted_triton():
    with interpret_mode():
        check(partial(grouped_results, "triton"))


def test_gradients_traced_outside_keep_what_the_call_was_traced_with():
    x = draw(3, 48, 4, 16)

    def gradient(rows):
        with batch_invariant():
            out, pull = jax.vjp(lambda q: modules.flash_attention(q, q, q, causal=True), x[rows])
        return np.asarray(pull(jnp.cos(out))[0])

    np.testing.assert_array_equal(gradient(np.array([2, 0]))[1], gradient(np.array([0]))[0])


@pytest.mark.parametrize("name", ["page_attention", "mla_decode", "ragged_page_attention"])
def test_tiles_do_not_follow_the_batch(name):
    from ejkernel.kernels.triton.targets import Target

    with interpret_mode():
        kernel = kernel_registry.get(name, "triton")
    target = Target("cuda", 90, 232448, 132)
    paged = {
        "heads": 32, "kv_heads": 8, "dim": 128, "value_dim": 128, "page_size": 16,
        "query_dtype": "bfloat16", "key_dtype": "bfloat16", "value_dtype": "bfloat16",
        "scale": 1.0, "layout": KVLayout.separate(8, 128, 128),
    }  # fmt: skip
    cls = PagedProblem
    if name == "mla_decode":
        cls = LatentProblem
        paged |= {"kv_heads": 1, "dim": 576, "value_dim": 512, "layout": KVLayout.latent(576)}

    def tiles(batch, pages, width):
        problem = cls(batch=batch, pages=pages, max_pages=width, **paged)
        if name.startswith("ragged"):
            problem = RaggedProblem(problem, rows=batch + width)
        return kernel.tiles(problem, target)

    with batch_invariant():
        assert tiles(1, 64, 1) == tiles(64, 9000, 512) == tiles(3, 10, 77)
        assert getattr(tiles(1, 64, 1), "decode", tiles(1, 64, 1)).splits == 16
    assert tiles(1, 64, 1) != tiles(64, 9000, 512)  # else this could not fail


def test_tiles_of_hopper_do_not_follow_the_batch():
    from ejkernel.kernels.pallas.gpu.common.chip import Chip
    from ejkernel.kernels.pallas.gpu.flash_attention.implementation import flash_attention

    def tiles(batch):
        q = jax.ShapeDtypeStruct((batch, 4096, 16, 128), jnp.bfloat16)
        call = flash_attention.call
        a = call.bind(call.prepare((q, q, q), {"causal": True}), typecheck=False)
        return flash_attention.tiles(flash_attention.problem(a), Chip())

    with batch_invariant():
        assert tiles(1) == tiles(64)
        assert tiles(1).bwd.one_way and not tiles(1).fwd.unshifted_first
    assert not tiles(1).bwd.one_way


def test_what_cannot_promise_it_is_refused_by_name():
    q, cu = draw(1, 48, 4, 16), np.array([0, 20, 48], np.int32)
    with batch_invariant():
        with pytest.raises(KernelNotSupported, match=r"attention.*batch_invariant"):
            modules.scaled_dot_product_attention(q, q, q)
        with pytest.raises(KernelNotSupported, match="cum_seqlens_q"):
            modules.flash_attention(q, q, q, cum_seqlens_q=cu, cum_seqlens_k=cu)
        with pytest.raises(KernelNotSupported, match="dropout_prob"):
            modules.flash_attention(q, q, q, dropout_prob=0.1, dropout_seed=0)
        with pytest.raises(KernelNotSupported, match="score_mod"):
            modules.flash_attention(q, q, q, score_mod=lambda x, b, h, i, j: x * b)
        shown = str(modules.explain("scaled_dot_product_attention", q, q, q))
    assert "depend on the batch" in shown


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_operations_that_do_not_promise_it(platform):
    q, mask = draw(1, 48, 4, 16), np.ones((1, 1, 3, 3), bool)
    sizes = {"q_block_size": 16, "kv_block_size": 16}
    with interpret_mode(), batch_invariant():
        for operation, arguments in (
            (modules.scaled_dot_product_attention, {}),
            (modules.blocksparse_attention, {"block_mask": mask, **sizes}),
        ):
            with pytest.raises(KernelNotSupported, match="batch_invariant"):
                operation(q, q, q, platform=platform, **arguments)


def test_it_is_part_of_the_key():
    q = draw(1, 48, 4, 16)
    keys = []
    for on in (False, True):
        with batch_invariant(on):
            keys.append(modules.explain("flash_attention", q, q, q).key)
    assert keys[0] != keys[1]
