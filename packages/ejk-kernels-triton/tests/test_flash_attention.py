"""Flash attention's kernels, run by Triton's interpreter, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejktest.attention import Call, arrays, check, run, with_mask_info

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import flash_attention, scaled_dot_product_attention
from ejkernel.kernels.triton.flash_attention import single_row
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import batch_invariant, interpret_mode
from ejkernel.types import MaskInfo
from ejktest.drawn import array
from ejktest.transforms import check_shard_map


@pytest.fixture(autouse=True)
def interpreted():
    """sm_80 tiles: the smaller ones."""
    with interpret_mode(), compile_for(cuda_target(80)):
        yield


def ids(*segments: tuple[int, int]) -> np.ndarray:
    """(id, length) pairs as segment ids of one batch row."""
    return np.concatenate([np.full(n, i) for i, n in segments]).astype(np.int32)[None]


SEGMENTS = ids((0, 11), (3, 18), (-1, 4), (1, 7))
POSITIONS = np.random.default_rng(3).permutation(40).astype(np.int32)[None]
DENSE = np.random.default_rng(1).random((1, 2, 40, 40)) < 0.4
DENSE[0, 0, 7] = False
BF16, F16 = ("bfloat16",) * 3, ("float16",) * 3


def small(name: str, **fields) -> Call:
    return Call(name, **{"b": 1, "h": 2, "hk": 2, "blocks": (16, 32), **fields})


CALLS = [
    small("full_odd", q=37, k=70),
    small("causal_gqa", b=2, h=4, hk=2, mask={"causal": True}),
    small("offset_mqa", q=20, k=50, hk=1, mask={"causal": True, "causal_offset": 30}),
    small("dead_rows", k=28, mask={"causal": True, "causal_offset": -16}, sinks=(2, 2)),
    small("window", k=60, mask={"sliding_window": (9, 3)}, sinks=(3,)),
    small("window_causal_cap", mask={"causal": True, "sliding_window": (5, 5)}, cap=0.7),
    # without a running maximum up to caps of 51, and with one
    small("cap_50", q=20, k=36, cap=50.0, sinks=(2,), dtypes=BF16),
    small("cap_60", q=20, k=36, cap=60.0, scale=-0.3, dtypes=BF16),
    small("cap_float16", q=20, k=36, cap=20.0, dtypes=F16),
    small("segments", mask={"q_segment_ids": SEGMENTS, "causal": True}),
    small(
        "packed",
        k=50,
        mask={
            "cum_seqlens_q": np.array([0, 7, 7, 31, 38]),
            "cum_seqlens_k": np.array([0, 20, 21, 21, 44]),
            "causal": True,
        },
    ),
    small(
        "positions",
        mask={"causal": True, "q_positions": POSITIONS, "kv_positions": POSITIONS, "chunk_size": 9},
    ),
    small("chunks", mask={"chunk_size": 12, "causal": True}),
    small("dense", mask={"attention_mask": DENSE}, bias=(1, 2), cap=2.0),
    small("bias_shared", b=2, q=20, k=36, bias=(2, 1), scale=-0.3),
    small("bias_one_row", b=2, q=20, k=36, bias=(1, 1)),
    small("dropout", q=33, dropout=0.4, mask={"causal": True}),
    small(
        "everything",
        b=2,
        h=4,
        d=24,
        dv=40,
        bias=(1, 4),
        sinks=(4, 1),
        cap=3.0,
        dropout=0.25,
        mask={
            "causal": True,
            "q_segment_ids": np.repeat(SEGMENTS, 2, 0),
            "attention_mask": np.repeat(DENSE[:, :1], 2, 0),
        },
    ),
    small("one_query", q=1, k=65, h=4, hk=1, d=16),
    small("one_key", q=20, k=1, sinks=(2, 1)),
    small("d80_bfloat16", d=80, q=20, dtypes=BF16, mask={"causal": True}),
    small("d192_v128", d=192, dv=128, q=20, k=20),
    small("d256_float16", d=256, q=20, k=40, dtypes=F16),
    small("large_logits", amplitude=8.0, mask={"causal": True}),
]
attend = with_mask_info(flash_attention)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_against_oracle(call: Call) -> None:
    x = arrays(call)
    check(call, x, *run(attend, call, x))


def test_the_oracle_comparison_can_fail() -> None:
    """A dropped sink, an offset of one and a flipped scale are all seen."""
    call = small("causal", q=20, k=20, mask={"causal": True}, sinks=(2, 1))
    x = arrays(call)
    wrong = (
        lambda *a, **o: attend(*a, **{**o, "softmax_aux": 1e-3 * o["softmax_aux"] - 9}),
        lambda *a, **o: attend(*a, causal_offset=1, **o),
        lambda *a, **o: attend(*a, **{**o, "softmax_scale": -(32**-0.5)}),
    )
    for function in wrong:
        with pytest.raises(AssertionError, match=r"largest error|rms ratio|infinities"):
            check(call, x, *run(function, call, x))


CFG = {
    "fwd_params": {"q_blocksize": 16, "kv_blocksize": 16},
    "bwd_params": {"q_blocksize": 16, "kv_blocksize": 16, "blocksize_m": 16, "blocksize_n": 16},
}


def small_arrays(n: int | None = None, b: int = 2):
    rng = np.random.default_rng(0)
    lead = () if n is None else (n,)
    return tuple(array(rng.standard_normal((*lead, b, 20, h, 16)), jnp.float32) for h in (2, 1, 1))


def same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6, rtol=2e-5), a, b)


def loss(q, k, v, segment_ids, bias, **options):
    mask = MaskInfo(q_segment_ids=segment_ids, kv_segment_ids=segment_ids)
    o, lse = flash_attention(
        q, k, v, bias, mask_info=mask, causal=True, return_lse=True, dropout_prob=0.3,
        dropout_seed=5, cfg=CFG, **options,
    )  # fmt: skip
    return (o**2).sum() + jnp.where(lse == -jnp.inf, 0.0, lse).sum()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_rows_of_which_every_logit_is_the_cap(sign: float) -> None:
    q, k = sign * jnp.full((1, 16, 1, 16), 40.0), jnp.full((1, 32, 1, 16), 40.0)
    v = jax.random.normal(jax.random.key(0), (1, 32, 1, 16))
    o, lse = flash_attention(q, k, v, logits_soft_cap=50.0, return_lse=True)
    np.testing.assert_allclose(o, jnp.broadcast_to(v.mean(1, keepdims=True), o.shape), atol=1e-6)
    np.testing.assert_allclose(lse, sign * 50.0 + np.log(32), rtol=1e-6)


def test_vmap_of_grad_equals_stacking() -> None:
    """Mapped, shared and broadcast operands; the mapped axis does not enter the dropout mask."""
    q, k, v = small_arrays(2, b=1)
    rng = np.random.default_rng(3)
    segment_ids = array(np.sort(rng.integers(-1, 3, (2, 1, 20)), -1), jnp.int32)
    bias = array(rng.standard_normal((1, 2, 20, 20)), jnp.float32)
    grad = jax.grad(loss, (0, 1, 2, 4))
    mapped = jax.jit(jax.vmap(grad, in_axes=(0, None, 0, 0, None)))(q, k[0], v, segment_ids, bias)
    single = jax.jit(grad)
    rows = [single(q[i], k[0], v[i], segment_ids[i], bias) for i in range(2)]
    close(mapped, jax.tree.map(lambda *x: jnp.stack(x), *rows))


def test_grad_of_vmap_sums_over_what_is_shared() -> None:
    q, k, v = small_arrays(2)
    mapped = jax.vmap(partial(flash_attention, causal=True, cfg=CFG), (0, None, 0))
    got = jax.jit(jax.grad(lambda k: (mapped(q, k, v) ** 2).sum()))(k[0])
    single = jax.jit(
        jax.grad(lambda k, q, v: (flash_attention(q, k, v, causal=True, cfg=CFG) ** 2).sum())
    )
    close(got, single(k[0], q[0], v[0]) + single(k[0], q[1], v[1]))


def test_two_runs_give_the_same_bits() -> None:
    q, k, v = small_arrays()
    run_once = jax.jit(jax.grad(partial(loss, segment_ids=jnp.zeros((2, 20), int), bias=None)))
    same(run_once(q, k, v), run_once(q, k, v))


ONE_ROW = [
    small("plain", q=1, k=40, h=4, d=16),
    small(
        "options", q=1, k=40, h=4, d=16, dv=24, sinks=(4, 2), cap=3.0, scale=-0.3,
        mask={"sliding_window": (9, 4), "causal_offset": 20},
    ),
    small("nothing", q=1, k=40, h=4, d=16, mask={"causal": True, "causal_offset": -2}),
]  # fmt: skip


@pytest.mark.parametrize("call", ONE_ROW, ids=str)
def test_one_query_row_is_decoded(call: Call, monkeypatch) -> None:
    """Values and gradients; a config that names a block of queries gets the usual kernel."""
    ran = []
    monkeypatch.setattr(single_row, "LEAST_KEYS", 16)
    forward = single_row.forward
    monkeypatch.setattr(single_row, "forward", lambda *a: ran.append(1) or forward(*a))
    x = arrays(call)
    check(call, x, *run(lambda *a, cfg, **options: flash_attention(*a, **options), call, x))
    assert ran
    ran.clear()
    jax.eval_shape(lambda q, k: flash_attention(q, k, k, cfg=CFG), x["q"], x["k"])
    assert not ran


def test_one_query_row_has_the_same_bits_in_any_batch(monkeypatch) -> None:
    """In batch-invariant calls, where the keys of all rows are not cut into equal ranges."""
    monkeypatch.setattr(single_row, "LEAST_KEYS", 16)
    rng = np.random.default_rng(0)
    q, k = (array(rng.standard_normal((3, length, 2, 16)), jnp.float32) for length in (1, 300))

    def attend(members, invariant):
        rows = np.array(members)
        with compile_for(cuda_target(90, 2)), batch_invariant(invariant):
            return flash_attention(q[rows], k[rows], k[rows], return_lse=True)

    alone, among = [0], [0, 1, 2]
    for one, several in zip(attend(alone, True), attend(among, True), strict=True):
        np.testing.assert_array_equal(one[0], several[0])
    default = attend(alone, False)[0][0], attend(among, False)[0][0]
    assert (default[0] != default[1]).any()  # else this could not fail


def test_scaled_dot_product_attention_is_the_same_kernel() -> None:
    q, k, v = small_arrays()
    bias = array(np.random.default_rng(1).standard_normal((1, 2, 20, 20)), jnp.float32)

    def total(function):
        def run(q, k, v, bias):
            return jnp.sum(jnp.sin(function(q, k, v, bias, sliding_window=(5, 0))))

        return jax.value_and_grad(run, (0, 1, 2, 3))(q, k, v, bias)

    same(total(scaled_dot_product_attention), total(flash_attention))


def test_checkpoint_and_scan() -> None:
    q, k, v = small_arrays()

    def layer(x, _):
        return flash_attention(x, k, v, causal=True, cfg=CFG), None

    def scanned(q):
        return (jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0] ** 2).sum()

    def unrolled(q):
        return (layer(layer(q, None)[0], None)[0] ** 2).sum()

    close(jax.jit(jax.grad(scanned))(q), jax.jit(jax.grad(unrolled))(q))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool) -> None:
    """Keys replicated over the mesh get the summed gradient."""
    q, k, v = small_arrays()

    def attend(q, k, v):
        k = jnp.broadcast_to(k, (q.shape[0], *k.shape[1:]))
        return flash_attention(q, k, v, causal=True, softmax_aux=jnp.ones(1), cfg=CFG)

    specs, rows = {"q": P("x"), "v": P("x")}, {"q": q, "k": k[:1], "v": v}
    check_shard_map(attend, rows, specs, P("x"), devices=2, check_vma=check_vma)


@pytest.mark.parametrize(("q_len", "kv_len", "b"), [(0, 8, 2), (8, 0, 2), (8, 8, 0)])
def test_empty_arrays_give_empty_results(q_len: int, kv_len: int, b: int) -> None:
    q, k = jnp.ones((b, q_len, 2, 16)), jnp.ones((b, kv_len, 2, 16))
    o, lse = flash_attention(q, k, k, return_lse=True)
    assert o.shape == q.shape and not o.any()
    assert lse.shape == (b, q_len, 2) and (lse == -jnp.inf).all()


def test_reading_past_an_operand_raises() -> None:
    """The interpreter refuses a launch that reads past an operand."""
    from ejkernel.kernels.triton.flash_attention.forward_kernel import ForwardLaunch
    from ejkernel.kernels.triton.flash_attention.tiles import Tiles
    from ejkernel.kernels.triton.interpret import run_interpreted
    from ejkernel.types.attention.problem import Problem
    from ejkernel.types.masks.structure import Rules

    shapes = tuple((name, (1, 32, 1, 16)) for name in ("q", "k", "v"))
    problem = Problem(1, 32, 32, 1, 1, 16, 16, "float32", 0.25)
    launch = ForwardLaunch(problem, Rules(), Tiles(16, 16), False, operands=shapes)
    short = np.ones((1, 31, 1, 16), np.float32)
    full = np.ones((1, 32, 1, 16), np.float32)
    run_interpreted(launch, full, full, full)
    with pytest.raises(IndexError, match="out-of-bounds load"):
        run_interpreted(launch, full, full, short)
