"""Native sparse attention on a GPU: real sizes against float64, and two runs alike."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.cases import sparse as sparse_cases
from ejktest.oracles import sparse as oracle
from ejktest.tolerance import check_close

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import flash_attention, native_sparse_attention
from ejkernel.kernels.triton.native_sparse_attention import select
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem
from ejkernel.kernels.triton.targets import current_target
from ejkernel.types.masks.token_blocks import block_means, find_blocks, means_mask

pytestmark = pytest.mark.gpu
# float32 matmuls run as TF32, which has the mantissa of float16
WORKING = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float16"}


@pytest.mark.parametrize("name", sparse_cases.CASES)
def test_selected_against_float64(name):
    case = sparse_cases.CASES[name]
    run, x = sparse_cases.case_of(native_sparse_attention, name)
    got, again = run(**x), run(**x)
    want = oracle.over_lists(
        x["query"][0], x["key"][0], x["value"][0], x["block_indices"][0], case.size,
        case.dim**-0.5, x["do"][0],
    )  # fmt: skip
    for label, a, b, w in zip(("o", "dq", "dk", "dv"), got, again, want, strict=True):
        check_close(a[0], w, dtype=WORKING[case.dtype], name=label)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "dim", "size", "slots", "dtype"),
    [
        (2000, 32, 2, 128, 16, 16, "bfloat16"),
        (1000, 6, 2, 80, 16, 40, "float16"),
        (500, 4, 4, 64, 4, 70, "float32"),
        (2100, 64, 1, 128, 2, 9, "bfloat16"),  # more blocks than are ranked at once
        (300, 160, 1, 64, 16, 5, "float16"),  # more heads than rows
        (300, 4, 2, 64, 2, 140, "bfloat16"),  # ranked by XLA
    ],
)
def test_chosen_blocks_have_the_best_scores(length, heads, kv_heads, dim, size, slots, dtype):
    """Float32 scores against those of float64: near-equal ones may change places."""
    rng = np.random.default_rng(0)
    q, k = (
        jnp.asarray(2 * rng.standard_normal((1, length, n, dim)), dtype) for n in (heads, kv_heads)
    )
    blocks = find_blocks(length, size)
    p = Problem(
        1, length, heads, kv_heads, dim, dim, size, blocks.count, slots, dim**-0.5, dtype, False
    )
    run = jax.jit(lambda q, k: select.select(p, current_target(), q, k, blocks, True))
    found = run(q, k)
    np.testing.assert_array_equal(found, run(q, k))
    score = oracle.scores(q[0], block_means(k, blocks)[0], size, p.scale)
    sparse_cases.check_chosen(found[0], score, rtol=1e-5, atol=1e-7)


def drawn(length, heads, kv_heads, dim=64, dtype="bfloat16"):
    """q, k, v and three gates; the gates in float32."""
    rng = np.random.default_rng(0)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, dim), *[(heads,)] * 3]
    kinds = [dtype] * 3 + ["float32"] * 3
    return [
        jnp.asarray(rng.standard_normal((1, length, *shape)), kind)
        for shape, kind in zip(shapes, kinds, strict=True)
    ]


def pulled(function, *args):
    out, back = jax.vjp(function, *args)
    return out, *back(jnp.cos(out))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (3, 3)])
def test_all_branches_against_float64(heads, kv_heads):
    """Blocks chosen; the output, and every gradient twice with the same bits."""
    length, size, window, count, scale = 37, 4, 10, 3, 0.2
    args = drawn(length, heads, kv_heads)

    @jax.jit
    def alone(q, k, v, g_cmp, g_slc, g_swa):
        return native_sparse_attention(
            q, k, v, g_cmp, g_slc, block_counts=count, block_size=size, g_swa=g_swa,
            sliding_window=window, softmax_scale=scale,
        )  # fmt: skip

    ours = jax.jit(partial(pulled, alone))
    got, again = ours(*args), ours(*args)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in args]
        out, back = jax.vjp(
            lambda q, k, v, *gates: oracle.sequence(
                q[0], k[0], v[0], [g[0] for g in gates], size=size, count=lambda t, m: count,
                scale=scale, window=window, length=length,
            )[None],
            *exact,
        )  # fmt: skip
        want = out, *back(jnp.cos(jnp.asarray(np.asarray(got[0], np.float64))))
    names = ("o", "dq", "dk", "dv", "dg_cmp", "dg_slc", "dg_swa")
    for name, a, b, w in zip(names, got, again, want, strict=True):
        check_close(a, w, dtype="bfloat16", name=name)
        np.testing.assert_array_equal(a, b)
    check_close(alone(*args), want[0], dtype="bfloat16", name="o without gradients")


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_few_means_of_many_tokens(kv_heads):
    """Flash attention over means, whose gradients take all heads' longest loops first."""
    length, size, heads = 2500, 10, 2
    q, do = (drawn(length, heads, heads)[i] for i in (0, 1))
    blocks = find_blocks(length, size)
    k, v = drawn(blocks.count, heads, kv_heads)[1:3]

    @jax.jit
    def ours(q, k, v, do):
        out, back = jax.vjp(
            lambda *x: flash_attention(*x, mask_info=means_mask(blocks, 1)), q, k, v
        )
        return out, *back(do)

    def theirs(q, k, v):
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        x = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
        seen = (jnp.arange(length)[:, None] + 1) // size > jnp.arange(blocks.count)
        p = jnp.where(seen, jnp.exp(x), 0.0)
        p /= jnp.maximum(p.sum(-1, keepdims=True), 1e-30)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    got, again = ours(q, k, v, do), ours(q, k, v, do)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, do)]
        out, back = jax.vjp(theirs, *exact[:3])
        want = out, *back(exact[3])
    for name, a, b, w in zip(("o", "dq", "dk", "dv"), got, again, want, strict=True):
        check_close(a, w, dtype="bfloat16", name=name)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 1), (2, 2)])
def test_packed_sequences_are_each_as_if_alone(heads, kv_heads):
    """Traced counts and cuts, an empty sequence, rows of none behind the last."""
    lengths, total = [100, 0, 37, 130], 300
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    args = drawn(total, heads, kv_heads)
    counts = np.random.default_rng(1).integers(1, 4, (1, total, kv_heads)).astype(np.int32)

    @jax.jit
    def ours(args, counts, cu=None):
        return pulled(
            lambda q, k, v, g_cmp, g_slc, g_swa: native_sparse_attention(
                q, k, v, g_cmp, g_slc, None, counts, cu, block_size=16, max_block_count=3,
                g_swa=g_swa, sliding_window=20,
            ),
            *args,
        )  # fmt: skip

    packed = ours([x.at[:, cu[-1] :].set(jnp.nan) for x in args], counts, cu)
    for a, b in itertools.pairwise(cu):
        if a < b:
            alone = ours([x[:, a:b] for x in args], counts[:, a:b])
            for name, got, want in zip("oqkvcsw", packed, alone, strict=True):
                check_close(got[:, a:b], want, dtype="bfloat16", name=name)
    for x in packed[1:]:
        assert not np.asarray(x, np.float32)[:, cu[-1] :].any()


@pytest.mark.parametrize(("heads", "slots"), [(1, 6), (16, 6), (16, 140)])
def test_ties_go_to_the_lower_block(heads, slots):
    length, size = 600, 4
    q, k = jnp.ones((1, length, heads, 64), jnp.bfloat16), jnp.ones((1, length, 1, 64))
    blocks = find_blocks(length, size)
    p = Problem(1, length, heads, 1, 64, 64, size, blocks.count, slots, 0.1, "bfloat16", False)
    run = jax.jit(lambda q, k: select.select(p, current_target(), q, k, blocks, True))
    found = np.asarray(run(q, k.astype(q.dtype)))[0, :, 0]
    for t in range(length):
        local_block = t // size
        earlier_blocks = [c for c in range((t + 1) // size) if c != local_block]
        np.testing.assert_array_equal(
            found[t], ([local_block, *earlier_blocks] + [-1] * slots)[:slots]
        )
