"""attention and scaled_dot_product_attention in XLA against the float64 oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.xla import attention, flash_attention, scaled_dot_product_attention
from ejktest.attention import Call, arrays, oracle_case
from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close

CALLS = [
    Call("plain", q=20, k=24, hk=2, dv=16),
    Call(
        "everything", mask={"causal": True, "sliding_window": 7}, cap=1.1, bias=(1, 4), sinks=(4, 2)
    ),
    Call("dead_rows", q=33, k=9, mask={"causal": True, "causal_offset": -8}, hk=1, sinks=(3,)),
    Call("bfloat16", dtypes=("bfloat16",) * 3, hk=2, mask={"causal": True}),
]


def kernel(call: Call, **options):
    return {**call.mask, "logits_soft_cap": call.cap, "softmax_scale": call.scale, **options}


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_attention_matches_the_reference(call: Call) -> None:
    x = arrays(call)
    names = [n for n in ("q", "k", "v", "bias", "sinks") if x[n] is not None]
    given = {n: jnp.asarray(x[n]) for n in names}

    def outputs(g):
        extra = {"bias": g.get("bias"), "softmax_aux": g.get("sinks")}
        return attention(g["q"], g["k"], g["v"], **kernel(call), **extra)

    @jax.jit
    def both(given, do):
        (o, w), vjp = jax.vjp(outputs, given)
        return o, w, vjp((do, jnp.zeros_like(w)))[0]

    o, w, grads = both(given, jnp.asarray(x["do"]))
    case = oracle_case(call, x)
    good, plain = oracle.attention(case), oracle.attention(case, plain=True)
    factor = 3.0 if call.cap else 2.0
    check_close(o, good.o, plain.o, factor=factor, name="o")
    check_close(w, good.weights, plain.weights.astype(w.dtype), factor=factor, name="weights")
    good = oracle.gradients(case, x["do"])
    plain = oracle.gradients(case, x["do"], plain=True)
    for n, g in grads.items():
        base = getattr(plain, f"d{n}")
        check_close(g, getattr(good, f"d{n}"), base, factor=factor, dtype=call.dtypes[0], name=n)


@pytest.mark.parametrize("raw", [False, True])
def test_dropout_is_that_of_flash_attention(raw: bool) -> None:
    call = Call("drop", q=18, k=20, h=2, hk=1, d=16)
    x = arrays(call)
    q, k, v = x["q"], x["k"], x["v"]
    rng = jax.random.PRNGKey(3) if raw else jax.random.key(3)
    run = jax.jit(partial(attention, deterministic=False, dropout_prob=0.3))
    o, w = run(q, k, v, dropout_rng=rng)
    seed = jax.random.bits(rng, (), "uint32")
    drop = oracle.dropout_factor(0.3, int(seed), w.shape)
    good = oracle.attention(oracle.Case(q, k, v, drop=drop))
    check_close(w, good.weights)
    check_close(o, good.o)
    flash = jax.jit(partial(flash_attention, dropout_prob=0.3))
    check_close(flash(q, k, v, dropout_seed=seed), good.o)
    dropped_out, _ = attention(q, k, v, dropout_rng=rng, dropout_prob=0.3)
    check_close(dropped_out, oracle.attention(oracle.Case(q, k, v)).o)


def test_dtypes_and_lazy_bias() -> None:
    call = Call("dtype", q=8, k=8, h=2, hk=2, d=8, dtypes=("float32", "bfloat16", "float32"))
    x = arrays(call)
    calls = []

    def init_bias():
        calls.append(1)
        return jnp.ones((1, 1, 8, 8))

    o, w = attention(x["q"], x["k"], x["v"], init_bias=init_bias, dtype="bfloat16")
    assert o.dtype == w.dtype == jnp.bfloat16 and calls == [1]
    o, w = attention(x["q"], x["k"], x["v"], jnp.zeros((1, 1, 8, 8)), init_bias=init_bias)
    assert o.dtype == w.dtype == jnp.float32 and calls == [1]


def test_a_call_that_names_no_dtype_is_not_taken_for_one_that_names_float64() -> None:
    """NumPy says that ``np.dtype("float64") == None``, by which compiled programs were found."""
    x = arrays(Call("float64", q=8, k=8, h=2, hk=2, d=8))
    with jax.enable_x64(True):
        for dtype in (None, jnp.float64, None):
            o, w = attention(x["q"], x["k"], x["v"], dtype=dtype)
            assert o.dtype == w.dtype == (dtype or jnp.float32)


def test_forward_mode_and_second_order() -> None:
    """Also through rows that see nothing, where nothing may become NaN."""
    call = Call("modes", b=1, q=6, k=5, h=2, hk=1, d=8)
    x = arrays(call)
    q, k, v = (jnp.asarray(x[n]) for n in ("q", "k", "v"))
    options = {"causal": True, "causal_offset": -2}

    for f in (
        lambda q: scaled_dot_product_attention(q, k, v, **options),
        lambda q: attention(q, k, v, logits_soft_cap=2.0, softmax_aux=jnp.ones(1), **options)[0],
    ):
        tangent = jnp.cos(jnp.arange(q.size, dtype=q.dtype)).reshape(q.shape)
        _, out = jax.jvp(f, (q,), (tangent,))
        _, vjp = jax.vjp(f, q)
        cotangent = jnp.sin(jnp.arange(out.size, dtype=q.dtype)).reshape(out.shape)
        np.testing.assert_allclose(
            (out * cotangent).sum(), (vjp(cotangent)[0] * tangent).sum(), rtol=1e-5
        )
        hessian = jax.jit(jax.hessian(lambda q, f=f: (f(q) ** 2).sum()))(q)
        hessian = hessian.reshape(q.size, q.size)
        assert np.isfinite(hessian).all() and np.abs(hessian).max() > 0
        np.testing.assert_allclose(hessian, hessian.T, atol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        Call("packed", b=1, hk=2, mask={"cum_seqlens_q": np.array([0, 9, 9, 31]), "causal": True}),
        Call("bias", b=2, q=16, k=40, bias=(2, 1), mask={"sliding_window": (3, 30)}, scale=0.4),
    ],
    ids=str,
)
def test_scaled_dot_product_attention(call: Call) -> None:
    x = arrays(call)

    def f(q, k, v, bias):
        return scaled_dot_product_attention(
            q, k, v, init_bias=lambda: bias, softmax_scale=call.scale, **call.mask
        )

    o, vjp = jax.vjp(jax.jit(f), *(x[n] for n in ("q", "k", "v", "bias")))
    case = oracle_case(call, x)
    check_close(o, oracle.attention(case).o, oracle.attention(case, plain=True).o, name="o")
    good = oracle.gradients(case, x["do"])
    plain = oracle.gradients(case, x["do"], plain=True)
    for n, g in zip(("dq", "dk", "dv", "dbias"), vjp(jnp.asarray(x["do"])), strict=True):
        if g is not None:
            check_close(g, getattr(good, n), getattr(plain, n), name=n)


def test_empty_lengths() -> None:
    q, none = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 0, 1, 8))
    assert not np.asarray(scaled_dot_product_attention(q, none, none, causal=True)).any()
    assert attention(q[:, :0], q, q, causal=True)[1].shape == (1, 2, 0, 3)


def test_agreement_with_jax() -> None:
    x = arrays(Call("jax", hk=2))
    q, k, v = x["q"], x["k"], x["v"]
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(9, 0))
    options = {"causal": True, "sliding_window": 9}
    for f in (scaled_dot_product_attention, flash_attention):
        np.testing.assert_allclose(jax.jit(partial(f, **options))(q, k, v), want, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"deterministic": False, "dropout_prob": 0.1}, "dropout_rng"),
        ({"deterministic": False, "dropout_prob": 0.1, "dropout_rng": jnp.ones(2)}, "dropout_rng"),
        (
            {"deterministic": False, "dropout_prob": 0.1, "dropout_rng": np.ones(3, np.uint32)},
            r"dropout_rng: expected a PRNG key: key\[\] or uint32\[2\]",
        ),
        ({"dropout_prob": -0.1}, "dropout_prob"),
        ({"bias": jnp.ones((2, 3, 8, 8))}, "bias"),
    ],
)
def test_bad_arguments_are_named(options, name: str) -> None:
    q = jnp.ones((2, 8, 2, 8))
    with pytest.raises(ValueError, match=name):
        attention(q, q, q, **options)
