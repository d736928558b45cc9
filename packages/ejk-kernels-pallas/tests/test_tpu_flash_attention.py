"""TPU flash attention in Pallas' interpreters, against the float64 oracle.

Most of the time is XLA compiling interpreted kernels, so each program here is compiled once, and
without XLA's optimisations.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.blocksparse_attention.implementation import blocksparse_attention
from ejkernel.kernels.pallas.tpu.common.chip import get_chip, interpreter
from ejkernel.kernels.pallas.tpu.flash_attention import tiles
from ejkernel.kernels.pallas.tpu.flash_attention.implementation import (
    flash_attention,
    mla_attention,
)
from ejkernel.ops import ConfigError, interpret_mode
from ejkernel.types import MaskInfo
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.structure import Unsupported
from ejktest.attention import (
    Call,
    arrays,
    check,
    run,
    split,
    with_gradients,
    with_mask_info,
)
from ejktest.cases import large_logits
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.drawn import array
from ejktest.grids import cover, without
from ejktest.oracles.attention import visible
from ejktest.oracles.latent import Latent, latent_attention, latent_gradients
from ejktest.tolerance import check_close


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(True):
        yield


def ids(*segments: tuple[int, int]) -> np.ndarray:
    """(id, length) pairs as segment ids of one batch row."""
    return np.concatenate([np.full(n, i) for i, n in segments]).astype(np.int32)[None]


SEGMENTS = ids((0, 60), (3, 70), (-1, 30), (1, 40))
POSITIONS = np.random.default_rng(3).permutation(200).astype(np.int32)[None]
PADDING = np.arange(200)[None] < np.array([[150], [0]])
BF16 = ("bfloat16",) * 3


def small(name: str, **fields) -> Call:
    sizes = {"b": 1, "q": 200, "k": 200, "h": 2, "hk": 2, "d": 64, "blocks": (128, 128)}
    return Call(name, **{**sizes, **fields})


CALLS = [
    small("full_odd", q=130, k=257, hk=1),
    small("causal_gqa_bf16", b=2, q=140, k=140, h=4, mask={"causal": True}, dtypes=BF16),
    small("offset", q=140, k=300, mask={"causal": True, "causal_offset": 160}, d=128),
    # the first block sees nothing and is not visited, nor do the first rows of the second
    small("dead_rows", k=100, mask={"causal": True, "causal_offset": -140}, sinks=(2, 2)),
    small("window_cap", k=300, mask={"sliding_window": (70, 30)}, sinks=(3,), cap=0.7),
    small("segments", mask={"q_segment_ids": SEGMENTS, "causal": True}, dtypes=BF16),
    small(
        "packed",
        k=250,
        mask={
            "cum_seqlens_q": np.array([0, 37, 37, 160, 190]),
            "cum_seqlens_k": np.array([0, 90, 91, 91, 240]),
            "causal": True,
        },
    ),
    small("chunks", mask={"causal": True, "chunk_size": 48}, scale=-0.2),
    small(
        "positions",
        mask={
            "causal": True,
            "q_positions": POSITIONS,
            "kv_positions": POSITIONS,
            "chunk_size": 90,
        },
    ),
    small("padding", b=2, q=140, mask={"attention_mask": PADDING}, sinks=(1,)),
    small("wide_narrow", q=1, k=150, d=160, dv=24),
    small("value_wider", q=129, k=140, d=80, dv=256, dtypes=("bfloat16", "float32", "float32")),
]
attend = with_mask_info(flash_attention)
NAMED = {call.name: call for call in CALLS}


@functools.cache
def program(name: str):
    """A call with its gradients as one jitted function."""
    return jax.jit(with_gradients(attend, NAMED[name]))


def outcome(name: str, x):
    """o, lse and the gradients by name of a call with arrays ``x``."""
    grads = program(name)(*split(x))
    return grads.pop("o"), grads.pop("lse"), grads


@pytest.mark.parametrize(
    "name",
    cover(
        NAMED,
        *("full_odd", "causal_gqa_bf16", "dead_rows", "window_cap", "packed", "chunks"),
        *("positions", "value_wider"),
    ),
)
def test_matches_the_oracle(name):
    x = arrays(NAMED[name])
    check(NAMED[name], x, *outcome(name, x))


def test_nan_that_a_row_sees_is_in_its_output_and_lse():
    q, k, v = (jnp.ones((1, 40, 2, 16)) for _ in range(3))
    run = jax.jit(functools.partial(flash_attention, causal=True, return_lse=True))
    for x in run(q, k.at[0, 20].set(jnp.nan), v):
        rows = np.isnan(x).reshape(40, -1)
        assert rows[20:].all() and not rows[:20].any()


SIZES = {"q_blocksize": 128, "kv_blocksize": 128}
TWO_KERNELS = {
    "fwd_params": SIZES,
    "bwd_params": {**SIZES, "blocksize_m": 128, "blocksize_n": 128},
    "fuses_gradients": False,
}


@pytest.mark.parametrize(("name", "cfg"), [("causal_gqa_bf16", None), ("positions", TWO_KERNELS)])
def test_transposed_gradients(name, cfg):
    """The forms of the gradients for matrix units of 256 columns."""
    call = replace(NAMED[name], b=1)
    x = arrays(call)
    function = attend
    if cfg is not None:
        function = with_mask_info(functools.partial(flash_attention, cfg=cfg))
        call = replace(call, blocks=None)
    with interpreter(kind="TPU v6 lite"):
        check(call, x, *run(function, call, x))


def test_query_gradient_of_its_own_kernel():
    """A head too long for vector memory, or the only one for two cores, has two kernels."""
    call = replace(NAMED["causal_gqa_bf16"], b=1, blocks=None)
    x = arrays(call)
    run_two = with_mask_info(functools.partial(flash_attention, cfg=TWO_KERNELS))
    check(call, x, *run(run_two, call, x))
    problem = Problem(1, 2**20, 2**20, 1, 1, 64, 64, "bfloat16", 1.0)
    for kind in ("TPU v4", "TPU v6 lite"):
        assert tiles.choose(problem, get_chip(kind)).fused is None
    one_head = replace(problem, q_len=512, kv_len=512)
    assert tiles.choose(one_head, get_chip("TPU v4")).fused is None
    assert tiles.choose(one_head, get_chip("TPU v6 lite")).fused is not None
    q = jnp.ones((1, 8, 1, 64))
    with pytest.raises(ConfigError, match="fuses_gradients"):
        flash_attention(q, q, q, cfg={"fuses_gradients": True})


@pytest.mark.parametrize("listed", [False, True])
def test_padded_keys_next_to_logits_far_below_zero(listed):
    """Their logit is 0, far above the lse; one kernel adds their tiles to the query gradient."""
    call = small("negative", q=256, k=300)
    x = arrays(call)
    x["q"], x["k"] = 4 + 0.1 * x["q"], 0.1 * x["k"] - 4
    attend_pattern = functools.partial(
        blocksparse_attention,
        block_mask=np.ones((1, 1, 2, 3), bool), q_block_size=128, kv_block_size=128,
    )  # fmt: skip
    function = attend_pattern if listed else flash_attention
    check(call, x, *run(with_mask_info(function), call, x))


def test_forward_without_maxima():
    """One head of a group has logits that leave the range; rows that see no key, windows."""
    call = small(
        "unshifted", q=200, k=270, h=3, hk=1, dtypes=BF16,
        mask={"causal": True, "causal_offset": -20, "sliding_window": (150, 0)},
    )  # fmt: skip
    x = arrays(call)
    x["q"][:, :, 1] *= 64
    pltpu.reset_tpu_interpret_mode_state()
    with interpreter(pltpu.InterpretParams(detect_races=True), "TPU v6 lite"):
        check(call, x, *run(attend, call, x))
    assert_no_races()
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("kind", cover(["TPU v5 lite", "TPU v6 lite"], "TPU v6 lite"))
def test_rows_as_a_projection_leaves_them(kind):
    """Grouped heads, values of another width, both forms of forward, a head again with maxima."""
    call = small("joined", h=4, hk=2, d=128, dv=256, dtypes=BF16, mask={"causal": True})
    x = arrays(call)
    x["q"][:, :, 1] *= 64
    sizes = {"q_blocksize": 128, "kv_blocksize": 128}
    cfg = {"fwd_params": sizes, "bwd_params": sizes, "joins_heads": True}
    joined = functools.partial(flash_attention, cfg=cfg)
    with interpreter(kind=kind):
        kernels = str(jax.make_jaxpr(lambda *a: joined(*a))(*(x[n] for n in "qkv")))
        assert "transpose" not in kernels.partition("pallas_call")[0]
        check(call, x, *run(with_mask_info(joined), replace(call, blocks=None), x))


def test_heads_of_64_are_not_joined():
    q = jnp.ones((1, 8, 2, 64))
    with pytest.raises(ConfigError, match="multiples of 128"):
        flash_attention(q, q, q, cfg={"joins_heads": True})


@pytest.mark.parametrize(
    ("kind", "block_q", "fused"),
    [("TPU v4", 256, True), ("TPU v6 lite", 128, True), ("TPU v6 lite", 128, False)],
)
def test_blocks_in_parts_and_strips(kind, block_q, fused, monkeypatch):
    """Blocks with and without mask, cut as large blocks are, in the forms of the gradients."""
    call = small(
        "strips", q=300, k=520, h=1, hk=1, blocks=(block_q, 256),
        mask={"q_segment_ids": ids((0, 290), (1, 10)), "kv_segment_ids": ids((0, 510), (1, 10)),
        "causal": True, "causal_offset": 256},
    )  # fmt: skip
    chosen = flash_attention.choose

    def cut(problem, target):
        found = chosen(problem, target)
        names, sizes = ("fwd", "dq", "dkv"), {"block_q": block_q, "block_kv": 256, "rows": 64}
        smaller = {n: replace(getattr(found, n), columns=128, **sizes) for n in names}
        # the running maximum of a strip is over all keys of a step, as shipped
        smaller["fwd"] = replace(found.fwd, **sizes)
        return replace(found, **smaller, fused=smaller["dkv"] if fused else None)

    monkeypatch.setattr(flash_attention, "choose", cut)
    monkeypatch.setattr(tiles, "EDGE", 128)
    x = arrays(call)
    with interpreter(kind=kind):
        check(call, x, *run(attend, call, x))


def test_rows_without_keys():
    """They give o = 0 and lse = -inf under sinks too, and pass no gradient on to anything."""
    call, dead = NAMED["dead_rows"], np.arange(200) < 140
    x = arrays(call)
    x |= {"do": x["do"] * dead[:, None, None], "dlse": x["dlse"] * dead[:, None]}
    o, lse, grads = outcome("dead_rows", x)
    np.testing.assert_array_equal((o == 0).all(axis=(0, 2, 3)), dead)
    np.testing.assert_array_equal((lse == -np.inf).all(axis=(0, 2)), dead)
    assert set(grads) == {"q", "k", "v", "sinks"}
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, np.zeros(grad.shape), err_msg=name)


def test_the_comparison_can_fail():
    """A dropped sink and an offset of one are seen."""
    call = NAMED["dead_rows"]
    x = arrays(call)
    results = outcome(call.name, x)
    moved = replace(call, mask={**call.mask, "causal_offset": -139})
    for one, y in ((call, {**x, "sinks": 1e-3 * x["sinks"] - 9}), (moved, x)):
        with pytest.raises(AssertionError, match=r"largest error|rms ratio|infinities"):
            check(one, y, *results)


def test_empty_lengths():
    q, k = jnp.ones((1, 3, 2, 64)), jnp.ones((1, 0, 2, 64))
    o, lse = flash_attention(q, k, k, return_lse=True)
    assert not o.any() and (lse == -jnp.inf).all()
    assert flash_attention(k, q, q).shape == (1, 0, 2, 64)


def test_vmap_equals_stacking_and_runs_repeat():
    """Also where the segment ids are mapped, so that each call has its own table."""
    rng = np.random.default_rng(0)
    q, k, v = (array(rng.standard_normal((2, 1, 130, 1, 64)), "float32") for _ in range(3))
    segments = array(rng.integers(0, 3, (2, 1, 130)).cumsum(-1) // 60, jnp.int32)
    cfg = {n: {"q_blocksize": 128, "kv_blocksize": 128} for n in ("fwd_params", "bwd_params")}

    def loss(q, k, v, segments):
        mask = MaskInfo(q_segment_ids=segments, kv_segment_ids=segments)
        return (flash_attention(q, k, v, mask_info=mask, causal=True, cfg=cfg) ** 2).sum()

    grad = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    mapped = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1, 2))))(q, k, v, segments)
    for n in range(2):
        one = grad(q[n], k[n], v[n], segments[n])
        for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a[n], b, rtol=2e-5, atol=2e-5)
        again = grad(q[n], k[n], v[n], segments[n])
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(a, b)


def test_simulated_memories():
    """Vector memory starts as NaN, blocks out of range are errors, races are found."""
    pltpu.reset_tpu_interpret_mode_state()
    call = small(
        "simulated", q=130, k=200, h=2, hk=1, mask={"q_segment_ids": ids((0, 70), (1, 60)),
        "kv_segment_ids": ids((0, 100), (1, 100)), "causal": True, "causal_offset": 60},
        sinks=(2, 1),
    )  # fmt: skip
    x = arrays(call)
    params = pltpu.InterpretParams(detect_races=True)
    with interpreter(params):
        check(call, x, *run(attend, call, x))
    assert_no_races()
    pltpu.reset_tpu_interpret_mode_state()


def test_refuses_what_it_cannot_do():
    q = jnp.ones((1, 8, 2, 64))
    with pytest.raises(Unsupported, match="bias"):
        flash_attention(q, q, q, jnp.ones((1, 1, 8, 8)))
    with pytest.raises(Unsupported, match="dropout_prob"):
        flash_attention(q, q, q, dropout_prob=0.5)
    with pytest.raises(Unsupported, match="precision: an algorithm"):
        flash_attention(q, q, q, precision="F32_F32_F32")
    with pytest.raises(Unsupported, match="float16"):
        flash_attention(*[q.astype(jnp.float16)] * 3)
    with pytest.raises(Unsupported, match="head dim 320"):
        flash_attention(*[jnp.ones((1, 8, 2, 320))] * 3)
    with pytest.raises(Unsupported, match="attention_mask"):
        flash_attention(q, q, q, attention_mask=np.eye(8, dtype=bool)[None, None])
    with interpret_mode(False), pytest.raises(Unsupported, match="need a TPU"):
        flash_attention(q, q, q)


LARGE = [c for c in large_logits.CASES if not c.call.bias]


@pytest.mark.parametrize("case", without(LARGE, *(c for c in LARGE if str(c) == "inputs")), ids=str)
def test_large_finite_logits_are_numbers(case: large_logits.Case) -> None:
    large_logits.check(case, flash_attention)


@pytest.mark.promotes
def test_a_scale_of_zero_hides_what_is_hidden() -> None:
    """All visible keys weigh the same, and the others nothing."""
    q, k, v = (jnp.ones((1, 130, 1, 64)) * jnp.arange(130.0)[:, None, None] for _ in range(3))
    o = flash_attention(q, k, v, softmax_scale=0.0, causal=True)
    np.testing.assert_allclose(o[0, :, 0, 0], np.arange(130) / 2, rtol=1e-5)


def test_what_lies_past_the_last_sequence_may_be_nan() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    clean = [jax.random.normal(x, (1, 130, 1, 64)) for x in keys]
    dirty = [x.at[:, 100:].set(jnp.nan) for x in clean]

    @jax.jit
    def run(q, k, v, do):
        cu = np.array([0, 40, 100])
        o, back = jax.vjp(lambda *x: flash_attention(*x, cum_seqlens_q=cu, causal=True), q, k, v)
        return o, *back(do)

    for got, want in zip(run(*dirty), run(*clean), strict=True):
        np.testing.assert_array_equal(got, want)


def test_latent_attention():
    """Keys and values expanded from latent rows, past whose last sequence there is NaN."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return array(rng.standard_normal(shape) * 0.3, "float32")

    x = Latent(
        normal(1, 130, 2, 48), normal(1, 130, 32), normal(32, 1, 48), normal(32, 1, 64),
        normal(1, 130, 16), normal(1, 130, 16),
    )  # fmt: skip
    cu, do = np.array([0, 40, 40, 100]), rng.standard_normal((1, 130, 2, 64))
    cfg = {n: {"q_blocksize": 128, "kv_blocksize": 128} for n in ("fwd_params", "bwd_params")}

    @jax.jit
    def run(arrays, do):
        def attend(x):
            return mla_attention(*x, cu_seqlens=cu, causal=True, return_lse=True, cfg=cfg)

        (o, lse), back = jax.vjp(attend, arrays)
        return o, lse, back((do.astype(o.dtype), jnp.zeros_like(lse)))[0]

    o, lse, grads = run(x._replace(latent=x.latent.at[:, 100:].set(np.nan)), do)
    see = visible(1, 130, 130, causal=True, cum_seqlens_q=cu)
    reference, exact = latent_attention(x, see=see), latent_gradients(x, do, see=see)
    check_close(o, reference.o)
    check_close(lse, reference.lse)
    for name in Latent._fields:
        got, want = getattr(grads, name), getattr(exact, name)
        if name == "latent":
            got, want = got[:, :100], want[:, :100]
        check_close(got, want, name=f"d{name}")
