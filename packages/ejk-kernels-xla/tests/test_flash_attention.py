"""Flash attention in XLA against the float64 oracle: every option, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import flash_attention
from ejkernel.types import InvalidArgument, MaskInfo
from ejktest.attention import Call, arrays, check, run, with_mask_info
from ejktest.drawn import array
from ejktest.grids import cover
from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close
from ejktest.transforms import check_shard_map

SEGMENTS = np.array([[0] * 11 + [3] * 18 + [-1] * 4 + [1] * 7, [-1] * 40], np.int32)
DENSE = np.random.default_rng(1).random((2, 1, 40, 40)) < 0.4
DENSE[0, 0, 7] = False
HEAD_DENSE = np.random.default_rng(2).random((1, 4, 40, 40)) < 0.5
PADDING = np.arange(40)[None] < np.array([[23], [0]])

CALLS = [
    Call("one_block", q=20, k=24, blocks=(32, 32)),
    Call("full", k=72),
    Call("causal", mask={"causal": True}),
    Call("causal_bottom_right", q=24, k=72, mask={"causal": True, "causal_offset": 48}, d=80),
    Call("causal_dead_rows", q=72, k=24, mask={"causal": True, "causal_offset": -30}, sinks=(4, 2)),
    Call("window", q=72, k=72, mask={"sliding_window": (9, 3)}, hk=1, sinks=(2,)),
    Call("window_self_causal_cap", mask={"causal": True, "sliding_window": (0, 5)}, cap=0.7),
    Call("segments", mask={"q_segment_ids": SEGMENTS, "causal": True}, hk=2, sinks=(4, 1)),
    Call("packed", b=1, mask={"cum_seqlens_q": np.array([0, 7, 7, 31, 36])}, dv=16),
    Call(
        "packed_two_sided",
        b=1,
        k=56,
        h=8,
        hk=1,
        mask={
            "cum_seqlens_q": np.array([0, 7, 7, 31, 40]),
            "cum_seqlens_k": np.array([0, 20, 21, 21, 50]),
            "causal": True,
            "sliding_window": (12, 12),
        },
        bias=(1, 8),
    ),
    Call("dense", mask={"attention_mask": DENSE}, hk=2, bias=(2, 4), dropout=0.25),
    Call("dense_heads", mask={"attention_mask": HEAD_DENSE, "causal": True}, hk=2),
    Call("padding", mask={"attention_mask": PADDING}, bias=(1, 1), cap=1.5, sinks=(3,)),
    Call("bias_rows_shared", bias=(2, 1), hk=1, scale=-0.3),
    Call("dropout", q=33, k=50, dropout=0.4, hk=2, mask={"causal": True}),
    Call("length_one", q=1, k=65, hk=1, h=8, d=128, blocks=(16, 64)),
    Call("one_key", q=37, k=1, sinks=(4, 1)),
    Call("tail_64", b=1, q=192, k=192, h=2, hk=2, d=64, blocks=(128, 128), mask={"causal": True}),
    Call("extreme", amplitude=30.0, mask={"causal": True}, sinks=(4, 2), rms_limit=1e-3),
    Call("bfloat16", dtypes=("bfloat16",) * 3, d=96, hk=2, mask={"causal": True}, sinks=(2,)),
    Call("float16", dtypes=("float16",) * 3, d=64, cap=2.0, bias=(1, 4)),
    Call("mixed", dtypes=("float32", "bfloat16", "float16"), d=40, mask={"sliding_window": 8}),
]


@pytest.mark.parametrize(
    "call",
    cover(
        CALLS,
        # the other calls have their masks, and more
        *(c for c in CALLS if str(c) not in ("full", "causal", "packed", "dense", "float16")),
    ),
    ids=str,
)
def test_against_oracle(call: Call) -> None:
    x = arrays(call)
    check(call, x, *run(with_mask_info(flash_attention), call, x))


@pytest.mark.parametrize(
    "call",
    [
        Call("float64", dtypes=("float64",) * 3, dv=24, hk=2, cap=3.0, sinks=(4, 2), bias=(1, 4)),
        Call("float64_drop", dtypes=("float64",) * 3, mask={"causal": True}, dropout=0.2, k=33),
    ],
    ids=str,
)
def test_float64_matches_the_reference(call: Call) -> None:
    with jax.enable_x64(True):
        x = arrays(call)
        o, lse, grads = run(flash_attention, call, x)
        assert o.dtype == lse.dtype == np.float64
        check(call, x, o, lse, grads)


CFG = {n: {"q_blocksize": 16, "kv_blocksize": 16} for n in ("fwd_params", "bwd_params")}


def small_loss(q, k, v, segment_ids=None, **options):
    mask = (
        None
        if segment_ids is None
        else MaskInfo(q_segment_ids=segment_ids, kv_segment_ids=segment_ids)
    )
    o, lse = flash_attention(
        q, k, v, mask_info=mask, causal=True, return_lse=True, cfg=CFG, **options
    )
    return (o.astype(jnp.float32) ** 2).sum() + lse.sum()


small_grad = jax.grad(small_loss, (0, 1, 2))


def small_arrays(n: int | None = None, seed: int = 0):
    rng = np.random.default_rng(seed)
    lead = () if n is None else (n,)
    return tuple(array(rng.standard_normal((*lead, 2, 24, h, 16)), jnp.float32) for h in (2, 1, 1))


def close(a, b) -> None:
    def leaf(x, y):
        # sums of the same terms in another order: rounded as the largest of them are
        np.testing.assert_allclose(x, y, atol=2e-6 * max(1.0, np.abs(y).max()), rtol=2e-5)

    jax.tree.map(leaf, a, b)


def test_vmap_of_grad_equals_stacking() -> None:
    """Mapped segment ids give every mapped call its own range of blocks."""
    q, k, v = small_arrays(3)
    ids = array(np.sort(np.random.default_rng(3).integers(0, 4, (3, 2, 24)), -1), jnp.int32)
    mapped = jax.jit(jax.vmap(small_grad, in_axes=(0, None, 0, 0)))(q, k[0], v, ids)
    single = jax.jit(small_grad)
    close(
        mapped,
        jax.tree.map(
            lambda *x: jnp.stack(x), *[single(q[i], k[0], v[i], ids[i]) for i in range(3)]
        ),
    )


def test_dropout_under_vmap_ignores_the_mapped_axis() -> None:
    q, k, v = small_arrays(2)
    run = partial(flash_attention, dropout_prob=0.5, dropout_seed=7, cfg=CFG)
    close(jax.vmap(run)(q, k, v)[1], run(q[1], k[1], v[1]))


def test_checkpoint_and_scan() -> None:
    q, k, v = small_arrays()

    def layers(q):
        def layer(x, _):
            return flash_attention(x, k, v, causal=True, cfg=CFG), None

        return (jax.lax.scan(jax.checkpoint(layer), q, None, length=3)[0] ** 2).sum()

    def unrolled(q):
        for _ in range(3):
            q = flash_attention(q, k, v, causal=True, cfg=CFG)
        return (q**2).sum()

    close(jax.jit(jax.grad(layers))(q), jax.jit(jax.grad(unrolled))(q))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool) -> None:
    """Traced ranges of blocks; keys replicated over the mesh get the summed gradient."""
    q, k, v = small_arrays()
    ids = array(np.sort(np.random.default_rng(3).integers(-1, 3, (2, 24)), -1), jnp.int32)

    def attend(q, k, v, ids):
        mask = MaskInfo(q_segment_ids=ids, kv_segment_ids=ids)
        k = jnp.broadcast_to(k, (q.shape[0], *k.shape[1:]))
        options = {"softmax_aux": jnp.ones(1), "sliding_window": 5, "return_lse": True}
        return flash_attention(q, k, v, mask_info=mask, cfg=CFG, **options)

    rows = {"q": q, "k": k[:1], "v": v, "ids": ids}
    specs = dict.fromkeys(("q", "v", "ids"), P("x"))
    check_shard_map(attend, rows, specs, (P("x"), P("x")), devices=2, check_vma=check_vma)


def test_traced_sequence_bounds() -> None:
    call = Call("packed", b=1, h=2, hk=1, d=16)
    x = arrays(call)
    f = jax.jit(lambda cu: flash_attention(x["q"], x["k"], x["v"], None, cu, causal=True, cfg=CFG))
    for cu in ([0, 5, 5, 33, 40], [0, 0, 17, 18, 30]):
        see = oracle.visible(1, 40, 40, causal=True, cum_seqlens_q=np.array(cu))
        case = oracle.Case(x["q"], x["k"], x["v"], see=see)
        want, base = oracle.attention(case).o, oracle.attention(case, plain=True).o
        check_close(f(jnp.asarray(cu)), want, base)


@pytest.mark.parametrize(("q_len", "kv_len", "b"), [(0, 8, 2), (8, 0, 2), (8, 8, 0)])
def test_empty_axes(q_len: int, kv_len: int, b: int) -> None:
    shapes = ((b, q_len, 2, 16), (b, kv_len, 1, 16), (b, kv_len, 1, 24))
    q, k, v = (jnp.ones(s) for s in shapes)
    sinks = jnp.ones((2, 1))
    o, lse = flash_attention(q, k, v, softmax_aux=sinks, return_lse=True, causal=True)
    assert o.shape == (b, q_len, 2, 24) and not np.asarray(o).any()
    assert lse.shape == (b, q_len, 2) and np.isneginf(lse).all()
    grads = jax.grad(lambda *a: flash_attention(*a, softmax_aux=sinks).sum(), (0, 1, 2))(q, k, v)
    for g, s in zip(grads, shapes, strict=True):
        assert g.shape == s and not np.asarray(g).any()


def test_bias_of_minus_infinity_hides() -> None:
    """Without a cap it is a mask (a row of it is empty); with a cap it is the logit -cap."""
    call = Call("bias", b=1, q=24, k=24, h=2, hk=2, d=16, bias=(1, 1), sinks=(2, 1))
    x = arrays(call)
    x["bias"][0, 0, 3] = x["bias"][0, 0, :, 5] = -np.inf
    o, lse, grads = run(flash_attention, call, x)
    assert not np.asarray(o[0, 3]).any() and np.isneginf(lse[0, 3]).all()
    assert not np.asarray(grads["bias"][0, 0, :, 5]).any()
    check(call, x, o, lse, grads)
    capped = replace(call, cap=1.3)
    check(capped, x, *run(flash_attention, capped, x))


def test_repeats_bit_by_bit_and_blocks_only_round() -> None:
    q, k, v = small_arrays()
    first, again = jax.jit(small_grad)(q, k, v), jax.jit(small_grad)(q, k, v)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    one_block = jax.grad(
        lambda q, k, v: small_loss(q, k, v, precision="highest", logits_dtype="float16"), (0, 1, 2)
    )
    close(jax.jit(one_block)(q, k, v), first)


def test_memory_is_linear() -> None:
    """Temporary memory of forward and backward grows with the length, not with its square."""

    def temporary(s: int) -> int:
        x = jax.ShapeDtypeStruct((1, s, 2, 16), jnp.float32)
        return jax.jit(small_grad).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    sizes = [temporary(s) for s in (1024, 2048, 4096)]
    assert sizes[2] - sizes[1] < 2.5 * (sizes[1] - sizes[0])
    assert sizes[2] < 16 * 4096 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"query": jnp.zeros((2, 24, 16))}, "query"),
        ({"query": jnp.zeros((2, 24, 2, 16), jnp.int32)}, "query"),
        ({"key": jnp.zeros((2, 24, 1, 8))}, "key"),
        ({"value": jnp.zeros((2, 23, 1, 16))}, "value"),
        (
            {
                "query": jnp.zeros((2, 24, 3, 16)),
                "key": jnp.zeros((2, 24, 2, 16)),
                "value": jnp.zeros((2, 24, 2, 16)),
            },
            "query",
        ),
        ({"bias": jnp.zeros((2, 2, 24, 1))}, "bias"),
        ({"softmax_aux": jnp.zeros((3, 1))}, "softmax_aux"),
        ({"attention_mask": jnp.zeros((2, 24))}, "attention_mask"),
        ({"mask_info": "causal"}, "mask_info"),
        ({"softmax_scale": jnp.ones(())}, "softmax_scale"),
        ({"dropout_prob": 0.5, "dropout_seed": jnp.zeros(2)}, "dropout_seed"),
        ({"dropout_prob": 1.0}, "dropout_prob"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"cum_seqlens_k": np.array([0, 24])}, "cum_seqlens_k"),
    ],
)
def test_bad_arguments_are_named(change, name: str) -> None:
    q, k, v = small_arrays()
    with pytest.raises((InvalidArgument, ValueError), match=name):
        flash_attention(**{"query": q, "key": k, "value": v, **change})


def test_one_bfloat16_query_of_many_keys_differentiates():
    """A matmul that XLA's CPU backend refuses in bfloat16."""
    q = jnp.ones((4, 1, 8, 128), jnp.bfloat16)
    k = array(np.random.default_rng(0).standard_normal((4, 2048, 2, 128)), jnp.bfloat16)
    grad = jax.jit(
        jax.grad(lambda q, k: flash_attention(q, k, k).astype(jnp.float32).sum(), (0, 1))
    )
    assert all(bool(jnp.isfinite(g.astype(jnp.float32)).all()) for g in grad(q, k))
