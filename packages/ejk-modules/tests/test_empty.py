"""Calls without sequences, blocks or heads: zeros, and gradients of zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejktest.calls import HK, B, S, call

HEADS = {"query": 2, "queries": 1, "key": 2, "value": 2, "keys": 1, "values": 1,
         "key_cache": 2, "value_cache": 2, "kv_pages": 2, "kv_cache": 2, "g": 2, "g_gamma": 0,
         "gk": 2, "gv": 2, "beta": 2, "initial_state": 1, "g_cmp": 2, "g_slc": 2, "g_swa": 2,
         "softmax_aux": 0, "bias": 1, "w_kc": 1, "w_vc": 1}  # fmt: skip


def assert_nothing(operation, arrays, **static):
    floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {n: x for n, x in arrays.items() if n not in floats}

    def loss(given):
        out = getattr(modules, operation)(**given, **rest, **static)
        first = jax.tree.leaves(out)[0]
        return first.sum(), first

    grads, out = jax.grad(loss, has_aux=True)(floats)
    assert out.shape[0] == next(iter(arrays.values())).shape[0] and not np.asarray(out).any()
    assert all(not np.asarray(g).any() for g in grads.values())


def test_native_sparse_attention_without_sequences_or_blocks():
    arrays = call("native_sparse_attention").arrays
    qkv = {n: arrays[n] for n in ("query", "key", "value")}
    one = {n: x[:1] for n, x in arrays.items()}
    assert_nothing("native_sparse_attention", one, cu_seqlens=np.zeros(1, int), sliding_window=3)
    none = jnp.zeros((B, S, HK, 0), jnp.int32)
    assert_nothing("native_sparse_attention", qkv, block_indices=none)


@pytest.mark.parametrize(
    "operation",
    ["page_attention", "flash_attention", "blocksparse_attention", "ragged_decode_attention",
     "native_sparse_attention", "ragged_page_attention", "gla_attention", "mla_attention",
     "gated_delta_rule", "ragged_page_attention_v3", "scaled_dot_product_attention"],
)  # fmt: skip
def test_without_heads(operation):
    c = call(operation)
    arrays = {}
    for name, x in c.arrays.items():
        arrays[name] = x[(slice(None),) * HEADS[name] + (slice(0),)] if name in HEADS else x
    assert_nothing(operation, arrays, **c.static)
