"""Sizes and integers past int32: refused by name, at once, before any memory is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import ejkernel.modules as modules
from ejkernel.types import MaskInfo
from ejkernel.types.arrays import MAX_LENGTH
from ejktest.calls import CALLS, call
from ejktest.variants import SPECS, axis_words, shapes_of


def trace(c, arrays, platform=None):
    run = getattr(modules, c.operation)
    return jax.eval_shape(lambda x: run(**x, **c.static, platform=platform), arrays)


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_an_axis_past_the_limit_is_named(operation):
    c = call(operation)
    message = rf"^\w+\.shape\[\d\]: given {2**31}, expected at most {MAX_LENGTH} for axis "
    for word in {word for words in axis_words(c).values() for word in words} - {"_", "1", "3"}:
        with pytest.raises(ValueError, match=f"{message}'{word}'"):
            trace(c, shapes_of(c, **{word: 2**31}))


@pytest.mark.parametrize("operation", ["ragged_decode_attention", "mean_pooling", "gla_attention"])
def test_an_axis_at_the_limit_is_legal(operation):
    trace(call(operation), shapes_of(call(operation), kv_len=MAX_LENGTH, seq=MAX_LENGTH), "xla")


PAGED = ["page_attention", "ragged_page_attention", "ragged_page_attention_v3", "mla_decode"]


@pytest.mark.parametrize("operation", PAGED)
def test_a_table_past_the_limit_is_named(operation):
    c = call(operation)
    message = rf"block_tables: given {2**28 + 1} pages of 4 tokens .* at most {MAX_LENGTH} tokens"
    with pytest.raises(ValueError, match=message):
        trace(c, shapes_of(c, max_blocks=2**28 + 1))
    trace(c, shapes_of(c, max_blocks=2**28), "xla")


def test_a_ring_past_the_limit_is_named():
    mesh = Mesh(np.array(jax.devices()[:4]), ("sp",))
    x = jax.ShapeDtypeStruct((1, 2**29, 1, 8), jnp.float32)
    seq = jax.sharding.PartitionSpec(None, "sp")

    def attend(x):
        return modules.ring_attention(x, x, x, axis_name="sp")

    local = jax.shard_map(attend, mesh=mesh, in_specs=seq, out_specs=seq, check_vma=False)
    with pytest.raises(ValueError, match=r"query.shape\[1\]: given 536870912, .* 4 devices"):
        jax.eval_shape(local, jax.ShapeDtypeStruct((1, 2**31, 1, 8), jnp.float32))
    with jax.set_mesh(mesh):
        assert jax.eval_shape(attend, x).shape == x.shape


def test_a_builder_of_a_block_mask_is_not_called_for_such_lengths():
    def builder(q_len, kv_len, heads):
        raise AssertionError((q_len, kv_len, heads))

    x = jax.ShapeDtypeStruct((1, 2**32, 2, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"query.shape\[1\]: given 4294967296"):
        jax.eval_shape(lambda x: modules.blocksparse_attention(x, x, x, mask_builder=builder), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: MaskInfo.from_lengths(np.ones(1, np.int32), max_q_len=n),
        lambda n: MaskInfo.from_cu_seqlens(np.arange(2), max_q_len=n),
        lambda n: MaskInfo.from_causal().get_or_compute_attention_mask(q_len=n, kv_len=1),
        lambda n: MaskInfo.create_chunked_attention_mask(4, n),
    ],
)
def test_lengths_of_a_mask_past_the_limit_are_named(make):
    with pytest.raises(ValueError, match=f"q_len: must be at most {MAX_LENGTH}, got {2**33}"):
        make(2**33)


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_wide_indices_of_jax_are_refused_where_they_are_concrete(operation):
    c = call(operation)
    with jax.enable_x64(True):
        for name in SPECS[operation].boundary.index_names:
            if name not in c.arrays:
                continue
            wide = jnp.asarray(c.arrays[name], jnp.int64) + 2**32
            message = rf"^{name}: given \d{{10}}, expected values that fit int32"
            with pytest.raises(ValueError, match=message):
                getattr(modules, operation)(**{**c.arguments, name: wide})
            trace(c, {**shapes_of(c), name: wide})
