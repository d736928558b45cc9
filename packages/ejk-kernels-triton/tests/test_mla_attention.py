"""Latent attention through Triton's interpreter, against a float64 oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.triton import mla_attention
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejktest.drawn import array
from ejktest.oracles.attention import visible
from ejktest.oracles.latent import Latent, latent_attention, latent_gradients
from ejktest.tolerance import check_close

pytest.importorskip("triton")

B, S, H, HK, R, DN, DR, DV = 1, 19, 2, 1, 24, 16, 8, 16
CFG = dict(
    fwd_params=dict(q_blocksize=16, kv_blocksize=16),
    bwd_params=dict(q_blocksize=16, kv_blocksize=16, blocksize_m=16, blocksize_n=16),
)


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(80)):
        yield


def case(form: str, batch: int = B, dtype=np.float32) -> Latent:
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return array(rng.standard_normal(shape) * scale, dtype)

    return Latent(
        normal(batch, S, H, DN + DR if form == "key" else DN),
        normal(batch, S, R),
        normal(R, HK, DN, scale=R**-0.5),
        normal(R, HK, DV, scale=R**-0.5),
        normal(batch, S, DR) if form == "both" else None,
        None if form == "none" else normal(batch, S, DR),
    )


@pytest.mark.parametrize(("form", "dtype"), [("both", jnp.bfloat16)])
def test_values_and_gradients(form, dtype):
    x = case(form, dtype=dtype)
    see = visible(B, S, S, causal=True)
    reference = latent_attention(x, see=see)
    do = np.random.default_rng(1).standard_normal(reference.o.shape)
    names = [n for n, a in x._asdict().items() if a is not None]

    def run(*arrays):
        given = dict(zip(names, arrays, strict=True))
        full = Latent(*(given.get(n) for n in Latent._fields))
        return mla_attention(*full, causal=True, cfg=CFG)

    out, pull = jax.vjp(run, *(getattr(x, n) for n in names))
    assert out.dtype == dtype
    check_close(out, reference.o)
    exact = latent_gradients(x, do, see=see)
    for name, got in zip(names, pull(jnp.asarray(do, dtype)), strict=True):
        check_close(got, getattr(exact, name), name=f"d{name}")


def test_packed_rows_and_what_nobody_sees():
    """NaN behind the last sequence reaches no gradient of a weight."""
    x = case("none", batch=1)
    cu = np.array([0, 5, 5, 17])
    spoiled = x._replace(latent=x.latent.at[:, 17:].set(np.nan))

    def run(latent, w_kc, w_vc):
        o, lse = mla_attention(
            x.query, latent, w_kc, w_vc, cu_seqlens=cu, causal=True, return_lse=True, cfg=CFG
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0)), (o, lse)

    (_, (o, lse)), grads = jax.value_and_grad(run, (0, 1, 2), has_aux=True)(*spoiled[1:4])
    reference = latent_attention(x, see=visible(1, S, S, causal=True, cum_seqlens_q=cu))
    check_close(o, reference.o)
    check_close(lse, reference.lse)
    assert not np.asarray(o[:, 17:]).any()
    assert all(np.isfinite(np.asarray(x)).all() for x in grads)


def test_nothing_expanded_is_kept():
    """Residuals are as large as the latent rows: expanded keys and values are not among them."""
    x = case("key")

    def run(*arrays):
        return mla_attention(*arrays[:4], b_k=arrays[4], causal=True)

    _, pull = jax.eval_shape(lambda *y: jax.vjp(run, *y), *x[:4], x.b_k)
    residuals = [leaf.shape for leaf in jax.tree.leaves(pull)]
    assert residuals and (B, S, HK, DN + DR) not in residuals and (B, S, HK, DV) not in residuals
