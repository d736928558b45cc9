"""Native sparse attention against its definition, token by token."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.xla import native_sparse_attention
from ejkernel.kernels.xla.native_sparse_attention import selected
from ejktest.cases.sparse import compare
from ejktest.drawn import array
from ejktest.grids import cover
from ejktest.oracles import sparse as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_transformations

S, HK, D, DV, SIZE = 21, 2, 8, 12, 4
RNG = np.random.default_rng(0)


def normal(*shape):
    return array(RNG.standard_normal(shape), jnp.float32)


def inputs(group, gates=3, length=S):
    h = HK * group
    arrays = [normal(1, length, h, D), normal(1, length, HK, D), normal(1, length, HK, DV)]
    return arrays + [normal(1, length, h) for _ in range(gates)]


@pytest.mark.parametrize(
    ("group", "count", "window"),
    cover([(1, 2, None), (3, 3, 5), (2, 99, 0)], (3, 3, 5), (2, 99, 0)),
)
def test_selection_and_all_branches(group, count, window):
    args = inputs(group)

    def ours(q, k, v, g_cmp, g_slc, g_swa):
        return native_sparse_attention(
            q, k, v, g_cmp, g_slc, block_counts=count, block_size=SIZE, sliding_window=window,
            g_swa=None if window is None else g_swa,
        )  # fmt: skip

    def theirs(q, k, v, g_cmp, g_slc, g_swa):
        gates = (g_cmp[0], g_slc[0], None if window is None else g_swa[0])
        return oracle.sequence(
            q[0], k[0], v[0], gates, size=SIZE, count=lambda t, m: count, scale=D**-0.5,
            window=window, length=S,
        )[None]  # fmt: skip

    compare(ours, theirs, args)


def test_heads_that_each_want_one_block_tie_at_large_logits():
    """Every score is a whole number: the logits' rounding must not order equal ones."""
    q, k, v = inputs(2, gates=0)
    q, k = q * 300, k * 300
    out = native_sparse_attention(q, k, v, block_counts=2, block_size=SIZE)
    expected = oracle.sequence(
        q[0], k[0], v[0], (None, None, None), size=SIZE, scale=D**-0.5, length=S,
        count=lambda t, m: 2,
    )  # fmt: skip
    np.testing.assert_allclose(out[0], expected, atol=1e-5)


def test_given_blocks_with_counts_duplicates_and_strangers():
    args = inputs(2, gates=0)
    slots = 5
    indices = RNG.integers(-2, S // SIZE + 3, (1, S, HK, slots)).astype(np.int32)
    indices[0, :, :, 2] = indices[0, :, :, 0]
    counts = RNG.integers(1, slots + 1, (1, S, HK)).astype(np.int32)

    def ours(q, k, v):
        return native_sparse_attention(
            q, k, v, block_indices=indices, block_counts=counts, block_size=SIZE,
            cfg={"q_tile": 4},
        )  # fmt: skip

    def theirs(q, k, v):
        return oracle.sequence(
            q[0], k[0], v[0], (None, None, None), size=SIZE, scale=D**-0.5, length=S,
            count=lambda t, m: int(counts[0, t, m]), indices=indices[0].tolist(),
        )[None]  # fmt: skip

    compare(ours, theirs, args)


def test_packed_equals_each_sequence_alone():
    lengths, total = [7, 0, 7, 1], 21
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v, g_cmp, g_slc, g_swa = inputs(2, length=total)
    counts = RNG.integers(1, 4, (1, total, HK)).astype(np.int32)

    def call(q, k, v, g_cmp, g_slc, g_swa, counts, cu=None):
        return native_sparse_attention(
            q, k, v, g_cmp, g_slc, None, counts, cu, g_swa=g_swa, block_size=SIZE,
            sliding_window=2, max_block_count=3,
        )  # fmt: skip

    everything = (q, k, v, g_cmp, g_slc, g_swa, counts)
    packed = jax.jit(call)(*everything, cu)
    for a, b in itertools.pairwise(cu):
        if a == b:
            continue
        alone = jax.jit(call)(*(jnp.asarray(x)[:, a:b] for x in everything))
        np.testing.assert_allclose(packed[:, a:b], alone, atol=2e-6)
    assert not np.asarray(packed)[:, cu[-1] :].any()


def test_no_gates_is_plain_selected_attention_and_half_precision():
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs(4, gates=0))
    every = np.broadcast_to(np.arange(-(-S // SIZE)), (1, S, HK, -(-S // SIZE)))
    out = native_sparse_attention(q, k, v, block_indices=every, block_counts=99, block_size=SIZE)
    assert out.dtype == jnp.bfloat16
    kk, vv = (jnp.repeat(x, 4, 2).astype(jnp.float32) for x in (k, v))
    x = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), kk) * D**-0.5
    p = jax.nn.softmax(jnp.where(np.tri(S, dtype=bool), x, -jnp.inf))
    check_close(out, jnp.einsum("bhqk,bkhd->bqhd", p, vv), rms_limit=5e-3)


def test_transformations_and_empty_input():
    q, k, v, g_cmp, g_slc, _ = inputs(2)
    f = partial(native_sparse_attention, block_counts=2, block_size=SIZE)
    args = {"query": q, "key": k, "value": v, "g_cmp": g_cmp, "g_slc": g_slc}
    check_transformations(f, {name: jnp.stack([x, x * 0.5]) for name, x in args.items()})
    assert f(q[:, :0], k[:, :0], v[:, :0]).shape == (1, 0, 2 * HK, DV)


def test_gradients_of_blocks_that_rows_share_are_summed_in_one_order():
    """The form for GPUs, whose scatter has no order: packed rows, duplicates, no block."""
    spec = selected.Spec(1.0, SIZE, S, 5, jnp.dtype("float32"))
    ends = np.array([7, 8, S])
    start = np.array([0, 7, 8])[np.searchsorted(ends, np.arange(S), "right")]
    chosen = RNG.integers(-1, 4, (S, HK, 5))
    rows = selected.Rows(*(array(x, jnp.int32) for x in (chosen, start, np.arange(S) - start)))
    token, seen, block = selected._tokens(spec, rows, S, 0)
    update = jnp.where(seen[..., None], normal(*token.shape, D), 0.0)
    total = normal(S, HK, D)
    expected = selected._add_each(total, token, block, update)
    got = selected._add_block_sums(total, token, block, update)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(got - total).max() > 1.0
