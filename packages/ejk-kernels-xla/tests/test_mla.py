"""Latent attention: the three rotary forms, packed sequences, and the absorbed decoding form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.xla import mla_attention, mla_decode
from ejkernel.types import InvalidArgument
from ejktest.drawn import array
from ejktest.oracles.attention import visible
from ejktest.oracles.latent import Latent, latent_attention, latent_gradients
from ejktest.tolerance import check_close

B, Q, H, HK, R, DN, DR, DV = 2, 19, 4, 2, 24, 16, 8, 20


def case(form: str, seed: int = 0, batch: int = B, dtype=np.float32) -> Latent:
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return array(rng.standard_normal(shape) * scale, dtype)

    dq = DN + DR if form == "key" else DN
    return Latent(
        normal(batch, Q, H, dq),
        normal(batch, Q, R),
        normal(R, HK, DN, scale=R**-0.5),
        normal(R, HK, DV, scale=R**-0.5),
        normal(batch, Q, DR) if form == "both" else None,
        None if form == "none" else normal(batch, Q, DR),
    )


@pytest.mark.parametrize("form", ["none", "key", "both"])
def test_against_oracle(form):
    x = case(form)
    see = visible(B, Q, Q, causal=True)
    reference = latent_attention(x, see=see, cap=3.0)
    do = np.random.default_rng(1).standard_normal(reference.o.shape)
    names = [n for n, a in x._asdict().items() if a is not None]

    def run(*arrays):
        given = dict(zip(names, arrays, strict=True))
        full = Latent(*(given.get(n) for n in Latent._fields))
        return mla_attention(*full, causal=True, logits_soft_cap=3.0)

    arrays = [getattr(x, n) for n in names]
    out, pull = jax.vjp(jax.jit(run), *arrays)
    check_close(out, reference.o)
    exact = latent_gradients(x, do, see=see, cap=3.0)
    for name, got in zip(names, pull(jnp.asarray(do, jnp.float32)), strict=True):
        check_close(got, getattr(exact, name), name=f"d{name}", rms_limit=4e-5)


def test_packed_lse_and_half_precision():
    x = case("key", batch=1, dtype=jnp.bfloat16)
    cu = np.array([0, 5, 5, 17])
    o, lse = mla_attention(*x, cu, causal=True, return_lse=True)
    see = visible(1, Q, Q, causal=True, cum_seqlens_q=cu)
    reference = latent_attention(x, see=see)
    check_close(o, reference.o, rms_limit=8e-3)
    check_close(lse, reference.lse, dtype=jnp.bfloat16)
    assert not np.asarray(o[:, 17:]).any()


def test_absorbed_decoding_is_the_last_row():
    x = case("key", batch=1)
    full = mla_attention(*x, causal=True)[0, -1]
    page = 4
    rows = jnp.concatenate([x.latent[0], x.b_k[0]], -1)
    rows = jnp.pad(rows, ((0, -Q % page), (0, 0))).reshape(-1, page, R + DR)
    nope, rope = x.query[0, -1, :, :DN], x.query[0, -1, :, DN:]
    w = jnp.repeat(x.w_kc, H // HK, 1)
    absorbed = jnp.concatenate([jnp.einsum("hn,rhn->hr", nope, w), rope], -1)
    latent = mla_decode(
        absorbed[None], rows, np.array([Q]), np.arange(len(rows))[None], latent_dim=R,
        softmax_scale=(DN + DR) ** -0.5,
    )[0]  # fmt: skip
    out = jnp.einsum("hr,rhn->hn", latent, jnp.repeat(x.w_vc, H // HK, 1))
    np.testing.assert_allclose(out, full, atol=3e-6)


def test_bad_shapes_are_named():
    x = case("both")
    with pytest.raises(ValueError, match="b_q"):
        mla_attention(*x[:5], None)
    with pytest.raises(InvalidArgument, match="w_vc"):
        mla_attention(*x._replace(w_vc=x.w_vc[:-1]))
    with pytest.raises(InvalidArgument, match="query"):
        mla_attention(*x._replace(query=x.query[..., :-1]))
