"""score_mod and mask_mod in XLA against the float64 oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.xla import flash_attention
from ejkernel.types import MaskInfo
from ejktest import mods
from ejktest.mods import FORMS

TILES = {"q_blocksize": 16, "kv_blocksize": 32}
CFG = {"fwd_params": TILES, "bwd_params": TILES}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_against_oracle(form) -> None:
    x = mods.arrays(form)
    mods.check(form, x, *mods.run_form(flash_attention, form, x, cfg=CFG))


def test_bfloat16_matches_the_reference() -> None:
    x = mods.arrays(FORMS[0], jnp.bfloat16)
    mods.check(FORMS[0], x, *mods.run_form(flash_attention, FORMS[0], x, cfg=CFG))


def test_float64_scores() -> None:
    with jax.enable_x64(True):
        seen = []

        def score(s, b, h, q, k):
            seen.append(s.dtype)
            return s + 1e-12 * k

        q = jnp.ones((1, 4, 1, 8), jnp.float64)
        _, lse = flash_attention(q, q, q, score_mod=score, return_lse=True)
        assert set(seen) == {np.dtype(np.float64)}
        assert lse.dtype == np.float64
        expected = np.log(np.exp(8**0.5 + 1e-12 * np.arange(4)).sum())
        np.testing.assert_allclose(lse[0, 0, 0], expected, rtol=1e-15)


def test_masks_from_mods_skip_and_combine() -> None:
    """A mask with its blocks, next to rules and segment ids, is the AND of all."""
    x = mods.arrays(FORMS[4])
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    ids = np.repeat(np.arange(4), 10)[None]
    mask = MaskInfo.from_mask_mod(lambda b, h, i, j: (i + j) % 5 > b, 40, 50, batch=2, block_size=8)
    mask &= MaskInfo.from_segments(ids, np.pad(ids, ((0, 0), (0, 10)), constant_values=3))
    o = flash_attention(q, k, v, mask_info=mask, causal=True, cfg=CFG)
    dense = flash_attention(q, k, v, mask_info=mask.dense, causal=True, cfg=CFG)
    np.testing.assert_allclose(o, dense, atol=2e-6)


def test_hidden_blocks_are_not_visited() -> None:
    """A program that visits hidden blocks would be NaN here: their tiles are, and nobody sees."""
    mask = MaskInfo.from_mask_mod(lambda b, h, i, j: (8 <= j) & (j < 32), 40, 40, block_size=8)
    blocks = mask.mask_mod.blocks[0, 0]
    np.testing.assert_array_equal(blocks, [[0, 2, 2, 2, 0]] * 5)
    tiles = {name: {"q_blocksize": 8, "kv_blocksize": 8} for name in CFG}
    q = jnp.ones((1, 40, 1, 8))
    dead = jnp.where(jnp.isin(jnp.arange(40) // 8, jnp.array([0, 4])), jnp.nan, 1.0)
    v = q * dead[:, None, None]
    np.testing.assert_allclose(flash_attention(q, q, v, mask_info=mask, cfg=tiles), 1.0, rtol=1e-6)


def loss(q, k, v, w):
    mods = {
        "score_mod": lambda s, b, h, i, j: s * w[h] + jnp.sin(w[(i + j) % 2]) * b,
        "mask_mod": lambda b, h, i, j: (j <= i + h) | (j < b),
    }
    return (flash_attention(q, k, v, cfg=CFG, **mods) ** 2).sum()


def small_arrays(*lead: int):
    rng = np.random.default_rng(0)
    shapes = ((4, 24, 4, 16), (4, 24, 2, 16), (4, 24, 2, 16), (4,))
    return tuple(jnp.asarray(rng.standard_normal((*lead, *s)), jnp.float32) for s in shapes)


grad = jax.grad(loss, (0, 1, 2, 3))


def close(a, b) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-4, rtol=2e-5), a, b)


def test_transformations_keep_results() -> None:
    x = small_arrays(2)
    alone = (jax.jit(grad)(*(a[i] for a in x)) for i in (0, 1))
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *alone)
    of_first = tuple(g[0] for g in stacked)
    close(jax.jit(jax.vmap(grad))(*x), stacked)
    close(jax.jit(jax.grad(lambda *x: jax.vmap(loss)(*x).sum(), (0, 1, 2, 3)))(*x), stacked)
    first = [a[0] for a in x]
    close(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2, 3)))(*first), of_first)
    only_w = jax.vmap(grad, (None, None, None, 0))(*first[:3], x[3])
    close(tuple(g[0] for g in only_w), of_first)


def test_captured_arrays_are_read_anew() -> None:
    """A function of the same code is not compiled again, and uses the arrays of now."""
    q, k, v, w = small_arrays()
    for value in (w, 2 * w):
        of_value = flash_attention(q, k, v, score_mod=lambda s, b, h, i, j, w=value: s * w[h])
        expected = flash_attention(q * value[:, None], k, v)
        np.testing.assert_allclose(of_value, expected, atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_sharded_mods_see_indices_of_the_whole_call() -> None:
    """Indices are those of the whole call under plain jit."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    q, k, v, w = small_arrays()
    spread = NamedSharding(mesh, P("data", None, "model"))
    sharded = [jax.device_put(a, spread) for a in (q, k, v)]
    close(jax.jit(grad)(*sharded, w), grad(q, k, v, w))
