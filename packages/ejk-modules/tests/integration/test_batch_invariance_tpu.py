"""Bits of a sequence's output and gradients in every batch, of TPU kernels in their interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

import ejkernel.modules as modules
from ejkernel.ops import KernelNotSupported, batch_invariant, kernel_registry
from ejktest.batches import (
    FEW,
    Sizes,
    check_bits,
    dense_results,
    draw,
    grouped_results,
    paged_results,
)
from ejktest.device import interpreted_tpu

# whole registers; a sequence has no whole number of blocks of queries and keys
WIDE = Sizes(rows=150, heads=4, kv_heads=2, dim=128, channels=128, page=16)
WHOLE = Sizes(rows=128, heads=2, kv_heads=1, dim=128)


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(pltpu.InterpretParams()):
        yield


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("flash_attention", WIDE, {}),
        pytest.param(
            *("mla_attention", Sizes(rows=20, heads=2, kv_heads=1), {}), marks=pytest.mark.slow
        ),
        pytest.param("recurrent_attention", WHOLE, {}, marks=pytest.mark.slow),
        pytest.param("gated_delta_rule", WHOLE, {}, marks=pytest.mark.slow),
        ("causal_conv1d", WIDE, {}),
        ("mean_pooling", WIDE, {"chunk_size": 16}),
    ],
)
def test_rows_have_the_same_bits_in_any_batch(name, sizes, options):
    check_bits(partial(dense_results, name, "pallas", s=sizes, **options), FEW[:2])


@pytest.mark.parametrize(
    "name",
    ["page_attention", "mla_decode", "ragged_page_attention_v3"],
)
def test_sequences_over_pages(name):
    check_bits(partial(paged_results, name, "pallas", s=WIDE), FEW[:2])


def test_groups_have_the_same_bits_in_any_batch():
    check_bits(partial(grouped_results, "pallas"), FEW[:2])


def test_what_depends_on_the_batch_is_refused():
    q, g = draw(2, 130, 2, 128), -jnp.abs(draw(2, 130, 2))
    with batch_invariant():
        for operation in (modules.recurrent_attention, modules.gated_delta_rule):
            with pytest.raises(KernelNotSupported, match="130 rows are not batch-invariant"):
                operation(q, q, q, g, platform="pallas")
        with pytest.raises(KernelNotSupported, match="length of the cache"):
            key, lens = q[:, :128], jnp.asarray([40, 50])
            modules.ragged_decode_attention(q[:, 0], key, key, 0 * lens, lens, platform="pallas")
        with pytest.raises(KernelNotSupported, match="batch_invariant"):
            modules.native_sparse_attention(q, q, q, platform="pallas", block_size=16)


@pytest.mark.parametrize("name", ["page_attention", "mla_decode", "ragged_page_attention"])
def test_tiles_do_not_follow_the_batch(name):
    latent = name == "mla_decode"
    kernel = kernel_registry.get(name, "pallas", "tpu")

    def tiles(batch, pages, width):
        shape = jax.ShapeDtypeStruct
        cache = shape((pages, 16, 640) if latent else (pages, 16, 8, 128), jnp.bfloat16)
        query = shape((batch, 32, 640 if latent else 128), jnp.bfloat16)
        lens, tables = shape((batch,), jnp.int32), shape((batch, width), jnp.int32)
        if latent:
            args, options = (query, cache, lens, tables), {"latent_dim": 512}
        elif name == "page_attention":
            args, options = (query, cache, cache, lens, tables), {}
        else:
            starts = shape((batch + 1,), jnp.int32)
            args, options = (query, cache, lens, tables, starts, 1), {}
        call = kernel.call
        a = call.bind(call.prepare(args, options), typecheck=False)
        return kernel.tiles(kernel.problem(a), kernel.target())

    with batch_invariant():
        assert tiles(1, 64, 1) == tiles(64, 9000, 512) == tiles(3, 10, 77)
    assert tiles(1, 64, 1) != tiles(64, 9000, 512)  # else this could not fail
