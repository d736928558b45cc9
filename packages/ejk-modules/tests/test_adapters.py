"""Layers of Flax and Equinox with flash attention inside, against the same layers without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import equinox_attention, flax_attention

B, S, FEATURES, HEADS = 2, 6, 16, 2
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (B, S, FEATURES))
CAUSAL = jnp.tril(jnp.ones((S, S)))
PADDING = (jnp.arange(S)[None] < jnp.array([[S], [4]]))[:, None, None]
MASKS = {
    "none": None,
    "causal": CAUSAL[None, None],  # floats, as Flax makes them
    "padding": PADDING,
    "both": jnp.logical_and(CAUSAL[None, None] != 0, PADDING),
    "per head": jnp.broadcast_to(CAUSAL, (1, HEADS, S, S)),
}


def close(a, b):
    np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.fixture
def linen():
    return pytest.importorskip("flax.linen")


@pytest.fixture
def nnx():
    return pytest.importorskip("flax.nnx")


@pytest.fixture
def eqx():
    return pytest.importorskip("equinox")


@pytest.mark.parametrize("name", ["both"])
def test_linen_layer(linen, name):
    layers = [
        linen.MultiHeadDotProductAttention(HEADS, **given)
        for given in ({}, {"attention_fn": flax_attention})
    ]
    variables = layers[0].init(KEY, X)

    def loss(layer, x):
        out = layer.apply(variables, x, mask=MASKS[name])
        return (out**2).sum(), out

    gradients = (jax.jit(jax.grad(functools.partial(loss, y), has_aux=True)) for y in layers)
    (da, a), (db, b) = (gradient(X) for gradient in gradients)
    close(a, b)
    np.testing.assert_allclose(da, db, atol=2e-5)


def test_linen_decodes_with_its_cache(linen):
    whole = linen.MultiHeadDotProductAttention(HEADS, attention_fn=flax_attention)
    step = linen.MultiHeadDotProductAttention(HEADS, attention_fn=flax_attention, decode=True)
    variables = step.init(KEY, X)
    cache, rows = variables["cache"], []
    for i in range(3):
        given = {"params": variables["params"], "cache": cache}
        out, changed = step.apply(given, X[:, i : i + 1], mutable=["cache"])
        cache = changed["cache"]
        rows.append(out)
    wanted = whole.apply({"params": variables["params"]}, X, mask=MASKS["causal"])
    close(jnp.concatenate(rows, 1), wanted[:, :3])


def test_linen_dropout(linen):
    def layer(**given):
        return linen.MultiHeadDotProductAttention(
            HEADS, dropout_rate=0.5, attention_fn=flax_attention, **given
        )

    own = layer(broadcast_dropout=False)
    variables = own.init(KEY, X, deterministic=True)
    outs = [
        own.apply(variables, X, deterministic=False, rngs={"dropout": jax.random.key(i)})
        for i in (1, 1, 2)
    ]
    plain = own.apply(variables, X, deterministic=True)
    assert (outs[0] == outs[1]).all()
    assert not jnp.allclose(outs[0], outs[2]) and not jnp.allclose(outs[0], plain)
    with pytest.raises(ValueError, match="broadcast_dropout=False"):
        layer().apply(variables, X, deterministic=False, rngs={"dropout": KEY})


def test_linen_refuses_what_it_cannot_do(linen):
    layer = linen.MultiHeadDotProductAttention(HEADS, attention_fn=flax_attention)
    variables = layer.init(KEY, X)
    with pytest.raises(ValueError, match="sow_weights=False"):
        layer.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    other = linen.MultiHeadDotProductAttention(
        HEADS,
        attention_fn=flax_attention,
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
    )
    with pytest.raises(ValueError, match="qk_attn_weights_einsum"):
        other.apply(variables, X)


@pytest.mark.parametrize(("name", "is_causal"), [("none", True), ("both", False)])
def test_nnx_layer(nnx, name, is_causal):
    def layer(**given):
        return nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), decode=False, **given)

    given = {"mask": MASKS[name]} | ({"is_causal": True} if is_causal else {})
    close(layer(attention_fn=flax_attention)(X, **given), layer()(X, **given))


def test_nnx_decodes_with_its_cache(nnx):
    given = {"rngs": nnx.Rngs(0), "attention_fn": flax_attention}
    layer = nnx.MultiHeadAttention(HEADS, FEATURES, **given)
    whole = layer(X, mask=MASKS["causal"], decode=False)
    layer.init_cache(X.shape)
    rows = [layer(X[:, i : i + 1], decode=True) for i in range(3)]
    close(jnp.concatenate(rows, 1), whole[:, :3])


def test_nnx_dropout_and_sowing(nnx):
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, rngs=nnx.Rngs(0), decode=False, dropout_rate=0.5,
        broadcast_dropout=False, attention_fn=flax_attention,
    )  # fmt: skip
    first, second = (layer(X, deterministic=False) for _ in range(2))
    assert not jnp.allclose(first, second)
    close(layer(X, deterministic=True), layer(X, deterministic=True))
    with pytest.raises(ValueError, match="sow_weights=False"):
        layer(X, deterministic=True, sow_weights=True)


@pytest.mark.promotes
def test_bias_batch_axes_and_more_options():
    q = jax.random.normal(KEY, (2, 3, S, HEADS, 4))
    bias = jax.random.normal(KEY, (3, 1, S, S))  # batch axes broadcast too
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q, q) / 2 + bias)
    near = CAUSAL - jnp.tril(CAUSAL, -2)
    weights = weights * near / (weights * near).sum(-1, keepdims=True)
    windowed = functools.partial(flax_attention, sliding_window=(1, 0), platform="xla")
    wanted = jnp.einsum("...hqk,...khd->...qhd", weights, q)
    close(jax.jit(windowed)(q, q, q, bias), wanted)
    half = jax.eval_shape(functools.partial(flax_attention, dtype=jnp.bfloat16), *[q[0, 0]] * 3)
    assert half.dtype == jnp.bfloat16 and half.shape == q.shape[2:]
    with pytest.raises(ValueError, match=r"mask: given shape \(5, 6\)"):
        flax_attention(q, q, q, mask=CAUSAL[:5])
    with pytest.raises(ValueError, match="dropout_rng: given None"):
        flax_attention(q, q, q, dropout_rate=0.1, broadcast_dropout=False)


@pytest.mark.parametrize("name", ["none", "per head"])
def test_equinox_layer(eqx, name):
    layer = eqx.nn.MultiheadAttention(HEADS, FEATURES, key=KEY)
    given = {"process_heads": lambda q, k, v: (-q, k, 2 * v)} if name == "none" else {}
    mask = None if MASKS[name] is None else MASKS[name][0] != 0

    def loss(attend, x):
        out = attend(x, x, x, mask, **given)
        return (out**2).sum(), out

    attends = (layer, functools.partial(equinox_attention, layer))
    (da, a), (db, b) = (
        jax.jit(jax.grad(functools.partial(loss, f), has_aux=True))(X[0]) for f in attends
    )
    close(a, b)
    np.testing.assert_allclose(da, db, atol=2e-5)


def test_equinox_maps_over_a_batch_and_takes_options(eqx):
    layer = eqx.nn.MultiheadAttention(HEADS, FEATURES, key=KEY)
    attend = functools.partial(equinox_attention, layer, causal=True)
    batched = jax.jit(jax.vmap(lambda x: attend(x, x, x)))(X)
    close(batched[1], layer(X[1], X[1], X[1], CAUSAL != 0))


def test_equinox_dropout(eqx):
    layer = eqx.nn.MultiheadAttention(HEADS, FEATURES, dropout_p=0.5, key=KEY)
    x = X[0]
    a, b = (equinox_attention(layer, x, x, x, key=jax.random.key(i)) for i in (1, 2))
    assert not jnp.allclose(a, b)
    calm = equinox_attention(layer, x, x, x, inference=True)
    close(calm, layer(x, x, x, inference=True))
    with pytest.raises(ValueError, match="key: given None"):
        equinox_attention(layer, x, x, x)
