"""Bits of a sequence's output and gradients in every batch: alone, with others, in any order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejkernel.ops import KernelNotSupported, batch_invariant, interpret_mode, kernel_registry
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.problem import LatentProblem, PagedProblem, RaggedProblem
from ejktest.batches import (
    COMPOSITIONS,
    DENSE,
    FEW,
    Sizes,
    check_bits,
    dense_results,
    draw,
    expected_paged,
    grouped_results,
    paged_results,
    ragged_results,
)

SERVING = ("page_attention", "mla_decode", "ragged_page_attention")


@pytest.mark.parametrize("name", SERVING)
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


@pytest.mark.parametrize("name", DENSE)
def test_rows_of_xla(name):
    check_bits(partial(dense_results, name, "xla"), FEW)


def test_a_zero_keeps_its_sign_in_any_batch():
    x = draw(2, 8, 4)

    def gradient(rows):
        with batch_invariant():
            out, pull = jax.vjp(modules.mean_pooling, x[rows])
            return np.asarray(pull(jnp.full_like(out, -0.0))[0])

    alone, pair = gradient(np.array([0])), gradient(np.array([0, 1]))
    assert np.signbit(pair).all()  # else this could not fail
    assert alone.tobytes() == pair[:1].tobytes()


def test_gradients_of_shared_arrays_are_added_in_float32():
    x = jnp.ones((600, 1, 2), jnp.bfloat16)  # a sum of ones in bfloat16 ends at 256
    weight, bias = jnp.ones((2, 2), jnp.bfloat16), jnp.zeros(2, jnp.bfloat16)
    with batch_invariant():
        out, pull = jax.vjp(lambda w, b: modules.causal_conv1d(x, w, b), weight, bias)
        dweight, dbias = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(dbias, 600)
    np.testing.assert_array_equal(dweight, [[0, 600]] * 2)  # the first reads before the row
    assert dweight.dtype == dbias.dtype == jnp.bfloat16


def test_gradients_of_weights_are_added_in_float32():
    query, latents = jnp.ones((600, 1, 1, 2), jnp.bfloat16), jnp.ones((600, 1, 3), jnp.bfloat16)
    weights = jnp.ones((3, 1, 2), jnp.bfloat16)  # of the values, which a row returns as they are
    with batch_invariant():
        run = partial(modules.mla_attention, query, latents, weights, platform="xla")
        out, pull = jax.vjp(run, weights)
        (gradient,) = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(gradient, 600)
    assert gradient.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["page_attention", "mla_decode"])
def test_paged_sequences_of_xla(name):
    check_bits(partial(paged_results, name, "xla"), FEW)


def test_values_of_xla_over_pages():
    for name in ("ragged_page_attention", "ragged_page_attention_v3"):
        with batch_invariant():
            out = ragged_results(name, "xla", [2, 0, 1])[0]
        np.testing.assert_allclose(out, expected_paged(name)[[2, 0, 1]], atol=2e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("ragged_page_attention", {}, marks=pytest.mark.slow),
        ("ragged_page_attention_v3", {"sliding_window": 30, "logits_soft_cap": 20.0}),
    ],
)
def test_ragged_sequences_of_xla(name, options):
    check_bits(partial(ragged_results, name, "xla", gradients=True, **options), FEW)


@pytest.mark.parametrize("options", [{}, {"transpose_rhs": True}, {"narrow": True}])
def test_groups_of_xla(options):
    # a matmul of several rows takes other sums for a row here than one of one row
    columns = {"columns": 64} if "transpose_rhs" in options else {}
    check_bits(partial(grouped_results, "xla", **columns, **options), FEW)


@pytest.mark.parametrize("name", SERVING)
def test_paged_sequences_of_interpreted_triton(name):
    with interpret_mode():
        check_bits(partial(paged_results, name, "triton"), FEW)


def on_a_gpu():
    """Functions of a composition, by name."""
    results = {name: partial(dense_results, name, "triton") for name in DENSE}
    results |= {name: partial(paged_results, name, "triton") for name in SERVING}
    results["mla_attention"] = partial(dense_results, "mla_attention", "triton")
    results["grouped_matmul of 8 bits"] = partial(grouped_results, "triton", narrow=True)
    return results | {"grouped_matmul": partial(grouped_results, "triton")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(on_a_gpu()))
def test_sequences_on_a_gpu(name):
    check_bits(on_a_gpu()[name])


def test_gradients_of_interpreted_triton_over_pages():
    with interpret_mode():
        run = partial(ragged_results, "ragged_page_attention", "triton", gradients=True)
        check_bits(run, FEW[:2])


def test_latent_rows_of_interpreted_triton():
    with interpret_mode():
        check_bits(partial(dense_results, "mla_attention", "triton", s=Sizes(rows=20)), FEW[:2])


@pytest.mark.parametrize("narrow", [False, True])
def test_groups_of_interpreted_triton(narrow):
    with interpret_mode():
        check_bits(partial(grouped_results, "triton", narrow=narrow), FEW)


def test_gradients_traced_outside_keep_what_the_call_was_traced_with():
    x = draw(3, 48, 4, 16)

    def gradient(rows):
        with batch_invariant():
            out, pull = jax.vjp(lambda q: modules.flash_attention(q, q, q, causal=True), x[rows])
        return np.asarray(pull(jnp.cos(out))[0])

    np.testing.assert_array_equal(gradient(np.array([2, 0]))[1], gradient(np.array([0]))[0])


@pytest.mark.parametrize("name", SERVING)
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
        assert tiles(1) == tiles(3) == tiles(64)
        # where a tile is computed again because another needs it, its bits follow the batch
        assert tiles(1).fwd.unshifted_first and tiles(1).fwd.flag_per_tile
        assert tiles(1).bwd.one_way
    assert not tiles(1).bwd.one_way and not tiles(1).fwd.flag_per_tile  # else this could not fail


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
