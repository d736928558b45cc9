"""The plain-array pieces around attention kernels, against JAX's own derivative of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types.attention.softmax import empty_outputs, row_delta, sink_gradient, sum_by_halves

B, Q, K, H, D, DV = 2, 5, 4, 3, 8, 6
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def attention(x, v, sink, see):
    """o ``[b, q, h, dv]`` and lse ``[b, h, q]`` from logits ``[b, h, q, k]``, by the formula."""
    alive = see.any(-1)
    x = jnp.where(see, x, -1e30)
    everything = jnp.concatenate([x, jnp.broadcast_to(sink[:, :, None, None], (B, H, Q, 1))], -1)
    lse = jax.nn.logsumexp(everything, axis=-1)
    p = jnp.where(see, jnp.exp(x - lse[..., None]), 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v), jnp.where(alive, lse, -jnp.inf)


@pytest.mark.parametrize(("empty", "in_order"), [(False, False), (True, False), (False, True)])
def test_gradient_of_sinks(empty, in_order):
    x, v, sink, do = normal(B, H, Q, K), normal(B, K, H, DV), normal(1, H), normal(B, Q, H, DV)
    dlse = normal(B, H, Q)
    see = np.ones((B, H, Q, K), bool)
    if empty:
        see[:, :, :2] = False  # rows without keys: no share of theirs, whatever dlse says
        dlse = dlse.at[:, :, :2].set(jnp.nan)
    see = jnp.asarray(see)
    alive = see.any(-1)

    def loss(sink):
        o, lse = attention(x, v, sink, see)
        rows = jnp.swapaxes(alive, 1, 2)[..., None]
        return (jnp.where(rows, o, 0) * do).sum() + jnp.where(alive, lse * dlse, 0).sum()

    o, lse = attention(x, v, sink, see)
    delta = row_delta(o, do, dlse, in_order=in_order)
    assert delta.shape == (B, H, Q) and delta.dtype == jnp.float32
    if not empty:
        exact = np.einsum("bqhd,bqhd->bhq", *(np.asarray(a, np.float64) for a in (do, o))) - dlse
        np.testing.assert_allclose(delta, exact, atol=1e-5)
    ours = sink_gradient(sink, lse, delta)
    np.testing.assert_allclose(ours, jax.grad(loss)(sink), atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 7, 12, 64])
def test_sum_by_halves(size):
    x = jnp.arange(3 * size, dtype=jnp.float32).reshape(3, size)
    np.testing.assert_array_equal(sum_by_halves(x), x.sum(-1))


def test_no_sinks_no_gradient():
    assert sink_gradient(None, normal(B, H, Q), normal(B, H, Q)) is None


def test_sinks_of_minus_infinity():
    grad = sink_gradient(jnp.full((1, H), -jnp.inf), normal(B, H, Q), normal(B, H, Q))
    assert (grad == 0).all()


@pytest.mark.parametrize("axis", ["batch", "q", "k", "heads", None])
def test_calls_without_work(axis):
    b, q, k, h = (0 if axis == name else 2 for name in ("batch", "q", "k", "heads"))
    found = empty_outputs(
        jnp.ones((b, q, h, D), jnp.bfloat16), jnp.ones((b, k, h, D)), jnp.ones((b, k, h, DV))
    )
    if axis is None:
        assert found is None
        return
    o, lse = found
    assert o.shape == (b, q, h, DV) and o.dtype == jnp.bfloat16 and not o.any()
    assert lse.shape == (b, q, h) and lse.dtype == jnp.float32 and (lse == -jnp.inf).all()


def test_values_without_columns_still_have_an_lse():
    assert empty_outputs(normal(B, Q, H, D), normal(B, K, H, D), normal(B, K, H, 0)) is None
