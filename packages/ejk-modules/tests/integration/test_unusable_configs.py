"""Stored configs of the operations that do not lower: the heuristic tiles run, with one warning."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.xla import flash_attention as on_xla
from ejkernel.modules import (
    FlashAttention,
    FlashAttentionConfig,
    PageAttention,
    PageAttentionConfig,
)
from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    EjkernelWarning,
    Executor,
    PersistentCache,
    differentiate,
)
from ejkernel.ops.errors import reset_warnings

Q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 40, 2, 16)), jnp.float32)
BAD = 16
STORED = FlashAttentionConfig(
    platform="xla",
    fwd_params={"q_blocksize": 32, "kv_blocksize": 32},
    bwd_params={"q_blocksize": BAD, "kv_blocksize": 32},
)


@pytest.fixture
def refused(monkeypatch):
    """The backward tiles that were traced; the tiles of STORED do not compile."""
    seen: list[int] = []
    backward = type(on_xla).backward

    def checked(self, work, *args):
        seen.append(work.tiles.bwd.q)
        if work.tiles.bwd.q == BAD:
            raise RuntimeError("out of shared memory")
        return backward(self, work, *args)

    monkeypatch.setattr(type(on_xla), "backward", checked)
    reset_warnings()
    jax.clear_caches()
    differentiate._choose_by_lowering.cache_clear()
    return seen


def loss(executor, **how):
    kernel = FlashAttention()
    return lambda q: (executor(kernel, q, q, q, causal=True, **how) ** 2).sum()


def stored(folder):
    """An executor whose file has STORED for the calls of ``loss``."""
    key = Executor().explanation(FlashAttention(), Q, Q, Q, causal=True).key
    PersistentCache(folder).put(key, STORED)
    return Executor(ConfigSelectorChain(ConfigCache(), PersistentCache(folder), autotune=False))


@pytest.mark.parametrize("way", [jax.grad, lambda f: jax.jit(jax.grad(jax.checkpoint(f)))])
def test_gradients_that_do_not_lower_take_the_heuristic_tiles(tmp_path, refused, way):
    executor = stored(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jnp.isfinite(loss(executor)(Q))
        assert refused == []  # nobody asked for a gradient
    with pytest.warns(EjkernelWarning, match="flash_attention.*RuntimeError: out of") as told:
        gradient = way(loss(executor))(Q)
    assert len(told) == 1 and set(refused) > {BAD}
    expected = jax.grad(loss(Executor(), platform="xla"))(Q)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    assert executor.explanation(FlashAttention(), Q, Q, Q, causal=True).cfg == STORED


def test_an_explicit_config_fails_where_it_is_differentiated(refused):
    with pytest.raises(RuntimeError, match="out of shared memory"):
        jax.grad(loss(Executor(), cfg=STORED))(Q)


@pytest.mark.gpu
def test_on_a_gpu_what_does_not_fit_is_passed_over(tmp_path):
    """Tiles that ask for more shared memory than any GPU has, of both passes and of decoding."""
    reset_warnings()
    kernel, q = FlashAttention(), jnp.ones((1, 512, 4, 128), jnp.bfloat16)
    cache = PersistentCache(tmp_path)
    executor = Executor(ConfigSelectorChain(ConfigCache(), cache, autotune=False))
    wide = {"q_blocksize": 128, "kv_blocksize": 256, "num_warps": 8, "num_stages": 8}
    deep = {"q_blocksize": 64, "kv_blocksize": 64, "num_warps": 8, "num_stages": 8}
    for scale, params in ((0.1, {"fwd_params": wide}), (None, {"bwd_params": deep})):
        options = {} if scale is None else {"softmax_scale": scale}
        key = executor.explanation(kernel, q, q, q, **options).key
        cache.put(key, FlashAttentionConfig(platform="triton", **params))

        def total(q, options=options):
            return executor(kernel, q, q, q, **options).astype(jnp.float32).sum()

        with pytest.warns(EjkernelWarning, match="stored config of.*OutOfSharedMemory") as told:
            assert jnp.isfinite(jax.jit(jax.grad(total))(q)).all()
        assert len(told) == 1
    kernel, pages = PageAttention(), jnp.ones((256, 16, 2, 128), jnp.bfloat16)
    tables = jnp.arange(256, dtype=jnp.int32).reshape(1, 256)
    args = (jnp.ones((1, 8, 128), jnp.bfloat16), pages, pages, jnp.array([4096]), tables)
    huge = PageAttentionConfig(platform="triton", pages_per_block=2**20, num_splits=2**20)
    cache.put(executor.explanation(kernel, *args).key, huge)
    with pytest.warns(EjkernelWarning, match="kernel 'page_attention' is not used"):
        assert jnp.allclose(executor(kernel, *args), 1.0)
