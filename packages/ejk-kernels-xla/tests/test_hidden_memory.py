"""NaN where nobody looks reaches neither a value nor a gradient of a dense operation.

Nobody looks at the rows of queries that see no key, at rows past the last sequence, at padding, and
at whole blocks of keys that no query sees.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import (
    attention,
    blocksparse_attention,
    flash_attention,
    gated_delta_rule,
    gla_attention,
    mla_attention,
    mla_decode,
    native_sparse_attention,
    page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    ring_attention,
    scaled_dot_product_attention,
)
from ejktest.hidden import check, normal

S, HELD = 24, 19
CU = np.array([0, 6, HELD], np.int32)
TAIL = np.arange(S) >= HELD
BLOCKS = {"q_blocksize": 16, "kv_blocksize": 16}
CFG = {"fwd_params": BLOCKS, "bwd_params": BLOCKS}


QKV = {"query": normal(0, 1, S, 2, 8), "key": normal(1, 1, S, 2, 8), "value": normal(2, 1, S, 2, 8)}


@pytest.mark.parametrize("op", [flash_attention, scaled_dot_product_attention])
def test_past_the_last_sequence(op) -> None:
    cfg = CFG if op is flash_attention else None
    check(partial(op, cum_seqlens_q=CU, causal=True, cfg=cfg), QKV, TAIL, TAIL)


PAIRS = np.random.default_rng(3).random((1, 1, S, S)) < 0.5
DEAD, UNSEEN = np.arange(S) % 5 == 1, np.arange(S) // 4 == 2
PAIRS[:, :, DEAD] = PAIRS[..., UNSEEN] = False


def with_weights(**x):
    o, weights = attention(**x)
    return o, weights.swapaxes(1, 2)


@pytest.mark.parametrize("op", [flash_attention, with_weights])
def test_dense_mask(op) -> None:
    aux = {"softmax_aux": normal(4, 2, 1)}
    cfg = CFG if op is flash_attention else None
    function = partial(op, attention_mask=PAIRS, cfg=cfg)
    check(function, QKV | aux, DEAD, UNSEEN, without_rows=("softmax_aux",))


def test_by_structure() -> None:
    """The first rows see nothing, the last keys are seen by none."""
    dead, unseen = np.arange(S) < 10, np.arange(S) >= S - 10
    check(partial(flash_attention, causal=True, causal_offset=-10, cfg=CFG), QKV, dead, unseen)


def test_pattern_of_heads_that_walk_together() -> None:
    pattern = np.array([[[1, 0, 0], [0, 0, 0], [1, 0, 0]], [[1, 0, 1], [0, 0, 0], [1, 0, 1]]], bool)
    dead = unseen = np.arange(S) // 8 == 1
    cfg = {"fwd_params": {"q_blocksize": 8, "kv_blocksize": 8}} | {
        "bwd_params": {"q_blocksize": 8, "kv_blocksize": 8}
    }
    function = partial(
        blocksparse_attention, block_mask=pattern[None], q_block_size=8, kv_block_size=8, cfg=cfg
    )
    check(function, QKV, dead, unseen)


def test_ring() -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    ids = jnp.asarray(np.where(TAIL, -1, np.arange(S) >= 6), jnp.int32)[None]

    def function(**x):
        return jax.shard_map(
            lambda x, ids: ring_attention(**x, q_segment_ids=ids, causal=True, axis_name="sp"),
            mesh=Mesh(np.array(jax.devices()[:2]), ("sp",)),
            in_specs=(P(None, "sp"), P(None, "sp")),
            out_specs=P(None, "sp"),
        )(x, ids)

    check(function, QKV, TAIL, TAIL)


def test_latent_rows() -> None:
    arrays = {
        "query": QKV["query"], "key_value": normal(5, 1, S, 6), "b_k": normal(6, 1, S, 3),
        "w_kc": normal(7, 6, 2, 5), "w_vc": normal(8, 6, 2, 4),
    }  # fmt: skip
    function = partial(mla_attention, cu_seqlens=CU)
    check(function, arrays, TAIL, TAIL, without_rows=("w_kc", "w_vc"))


def test_native_sparse() -> None:
    gates = {"g_cmp": normal(5, 1, S, 2), "g_slc": normal(6, 1, S, 2)}
    function = partial(native_sparse_attention, cu_seqlens=CU, block_size=4, block_counts=2)
    check(function, QKV | gates, TAIL, TAIL)


def test_linear_steps() -> None:
    arrays = {n: x[:, :12] for n, x in QKV.items()} | {"g": -jnp.abs(normal(5, 1, 12, 2, 8))}
    rows = np.arange(12) >= 8
    check(partial(gla_attention, cu_seqlens=np.array([0, 6, 8], np.int32)), arrays, rows, rows)


@pytest.mark.parametrize("rows", [12, S])
def test_delta_rule(rows: int) -> None:
    gates = {"g": -jnp.abs(normal(5, 1, rows, 2)), "beta": normal(6, 1, rows, 2) / 8}
    arrays = {n: x[:, :rows] for n, x in QKV.items()} | gates
    padding = np.arange(rows) >= rows - 4
    cu = np.array([0, 6, rows - 4], np.int32)
    check(partial(gated_delta_rule, cu_seqlens=cu, normalize_qk=True), arrays, padding, padding)


LENS, TABLES = np.array([0, 10], np.int32), np.array([[0, 3, -1], [2, 2, 5]], np.int32)
PAGES = normal(5, 6, 4, 2, 8)
# as tracers: with arrays of NumPy a sequence of more rows than tokens is an error
STARTS, CONTEXTS = jnp.array([0, 3, 6]), jnp.array([2, 10])
SLICE = np.array([5, 2], np.int32), np.array([5, 9], np.int32)
OPTIONS = {"logits_soft_cap": 3.0, "return_lse": True}


def in_one_row(outputs):
    """Returns ``o`` and ``exp(lse)``, which is finite, as one batch row."""
    o, lse = outputs
    return o.reshape(1, -1, *o.shape[-2:]), jnp.exp(lse).reshape(1, -1, lse.shape[-1])


def test_row_of_an_empty_context() -> None:
    def call(query, pages):
        options = OPTIONS | {"num_splits": 2}
        return in_one_row(page_attention(query[0], pages, pages, LENS, TABLES, **options))

    arrays = {"query": normal(0, 1, 2, 4, 8), "pages": PAGES}
    check(call, arrays, LENS == 0, without_rows=("pages",))


def test_row_of_an_empty_slice_of_a_cache() -> None:
    def call(query, key, value):
        return in_one_row(ragged_decode_attention(query[0], key, value, *SLICE, **OPTIONS))

    arrays = {"query": normal(0, 1, 2, 4, 8), "key": normal(1, 2, 9, 2, 8)}
    check(call, arrays | {"value": normal(2, 2, 9, 2, 8)}, LENS == 0)


def test_packed_row_before_its_sequence() -> None:
    def call(query, pages):
        rows = CONTEXTS, TABLES, STARTS, 2
        return in_one_row(ragged_page_attention(query[0], pages, *rows, **OPTIONS))

    arrays = {"query": normal(0, 1, 6, 2, 8), "pages": PAGES}
    check(call, arrays, np.arange(6) == 0, without_rows=("pages",))


def test_latent_row_before_its_sequence() -> None:
    def call(query, pages):
        rows = query.reshape(2, 3, 2, 8)
        return in_one_row(mla_decode(rows, pages, CONTEXTS, TABLES, latent_dim=6, **OPTIONS))

    arrays = {"query": normal(0, 1, 6, 2, 8), "pages": PAGES[:, :, 0]}
    check(call, arrays, np.arange(6) == 0, without_rows=("pages",))
