"""Every code block of the ops guide, run as it is printed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    Invocation,
    Kernel,
    PersistentCache,
    autotune,
    autotune_recorded,
    benchmark,
    clear_invocations,
    default_key_builder_with_sharding,
    device_fingerprint,
    device_kind,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    from_json,
    get_device_platform,
    get_invocations,
    label,
    labels_to_configs,
    overlay_cache,
    pmap_with_config,
    policy_override,
    record_invocation,
    sharding_fingerprint,
    stable_json,
    to_json,
    vmap_with_config,
)


@dataclass(frozen=True)
class MyConfig:
    block_size: int = 128
    num_warps: int = 4
    algorithm: str = "default"


class MyKernel(Kernel[MyConfig, jnp.ndarray]):
    def __init__(self):
        super().__init__(name="my_kernel")

    def run(self, a, b, *, cfg: MyConfig, **kwargs) -> jnp.ndarray:
        """Default implementation."""
        return jnp.dot(a, b)

    def heuristic_cfg(self, inv: Invocation) -> MyConfig:
        """Generate config based on input shapes."""
        a = inv.args[0]
        block = 128 if a.shape[0] >= 128 else 64
        return MyConfig(block_size=block)

    def config_space(self, inv: Invocation) -> list[MyConfig]:
        """Return configs to try during autotuning."""
        return [
            MyConfig(block_size=64, num_warps=2),
            MyConfig(block_size=128, num_warps=4),
            MyConfig(block_size=256, num_warps=8),
        ]


@pytest.fixture(autouse=True)
def private_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    clear_invocations()
    yield
    clear_invocations()


@pytest.fixture
def a():
    return jnp.asarray(np.random.default_rng(0).normal(size=(32, 16)), jnp.float32)


@pytest.fixture
def b():
    return jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), jnp.float32)


def test_basic_kernel(a, b):
    kernel = MyKernel()
    np.testing.assert_allclose(kernel(a, b), np.asarray(a) @ np.asarray(b), rtol=1e-5, atol=1e-5)
    inv = Invocation(kernel, (a, b))
    assert kernel.heuristic_cfg(inv) == MyConfig(block_size=64)


def test_platform_specific(a):
    @dataclass(frozen=True)
    class AttentionConfig:
        triton_params: tuple = ()
        pallas_params: tuple = ()

    ran = []

    def triton_flash_attention(q, k, v, **params):
        ran.append("triton")
        return q + 1

    def pallas_attention(q, k, v, **params):
        ran.append("pallas")
        return q + 1

    def xla_attention(q, k, v):
        ran.append("xla")
        return q + k + v

    class AttentionKernel(Kernel[AttentionConfig, jnp.ndarray]):
        def run_triton(self, q, k, v, *, cfg, **kwargs):
            """Triton GPU implementation."""
            return triton_flash_attention(q, k, v, **cfg.triton_params)

        def run_pallas(self, q, k, v, *, cfg, **kwargs):
            """Pallas TPU implementation."""
            return pallas_attention(q, k, v, **cfg.pallas_params)

        def run_xla(self, q, k, v, *, cfg, **kwargs):
            """XLA fallback implementation."""
            return xla_attention(q, k, v)

        def run(self, q, k, v, *, cfg, **kwargs):
            """Default fallback."""
            return self.run_xla(q, k, v, cfg=cfg, **kwargs)

    out = AttentionKernel()(a, a, a)
    np.testing.assert_allclose(out, 3 * np.asarray(a), rtol=1e-6)
    if device_kind() == "cpu":
        assert ran == ["xla"]


def test_custom_gradients(a, b):
    def custom_forward(a, b, cfg):
        return jnp.dot(a, b)

    def custom_grad_a(a, b, ct, cfg):
        return 2 * (ct @ b.T)

    def custom_grad_b(a, b, ct, cfg):
        return 3 * (a.T @ ct)

    class MyKernel(Kernel[MyConfig, jnp.ndarray]):
        def run(self, a, b, *, cfg, **kwargs):
            return custom_forward(a, b, cfg)

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            """Custom backward pass."""
            a, b = primals
            ct = cotangents[0]
            grad_a = custom_grad_a(a, b, ct, cfg)
            grad_b = custom_grad_b(a, b, ct, cfg)
            return (grad_a, grad_b)

    kernel, executor = MyKernel(), Executor(ConfigSelectorChain(cache=ConfigCache()))
    loss = lambda a, b: executor(kernel, a, b).sum()  # noqa: E731
    grad_a, grad_b = jax.grad(loss, argnums=(0, 1))(a, b)
    ones = np.ones((32, 8))
    np.testing.assert_allclose(grad_a, 2 * ones @ np.asarray(b).T, rtol=1e-5)
    np.testing.assert_allclose(grad_b, 3 * np.asarray(a).T @ ones, rtol=1e-5, atol=1e-5)


def test_invocation(a, b):
    my_kernel = MyKernel()
    inv = Invocation(
        kernel=my_kernel,
        args=(a, b),
        kwargs={"scale": 1.0},
        metadata={...},
    )
    assert inv.abstract_args == (
        jax.ShapeDtypeStruct((32, 16), jnp.float32),
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
    )
    assert inv.abstract_kwargs == {"scale": 1.0}
    assert inv.device_fingerprint == device_fingerprint()
    assert inv.metadata == {...}
    with pytest.raises(AttributeError):
        inv.args = ()


def test_executor(a, b):
    my_kernel, my_config = MyKernel(), MyConfig(block_size=256)
    cache = ConfigCache()
    selector = ConfigSelectorChain(cache=cache)
    executor = Executor(selector)

    result = executor(my_kernel, a, b)
    np.testing.assert_allclose(result, np.asarray(a) @ np.asarray(b), rtol=1e-5, atol=1e-5)

    result = executor(my_kernel, a, b, cfg=my_config)
    np.testing.assert_allclose(result, np.asarray(a) @ np.asarray(b), rtol=1e-5, atol=1e-5)
    assert len(cache) == 0
    assert executor.choose_config(my_kernel, a, b) == MyConfig(block_size=64)


def test_config_cache():
    key, config = "key", MyConfig()
    cache = ConfigCache()
    assert cache.get(key) is None
    cache.put(key, config)
    assert cache.get(key) == config
    assert key in cache


def test_persistent_cache_survives_the_process(tmp_path):
    key, config = "key", {"block_size": 64}
    persistent = PersistentCache(path=tmp_path / "configs")
    persistent.put(key, config)
    assert persistent.get(key) == config
    code = (
        "from ejkernel.ops import PersistentCache; "
        f"print(PersistentCache(path={str(tmp_path / 'configs')!r}).get('key'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(config)


def test_config_selector_chain(a, b):
    selector = ConfigSelectorChain(
        cache=ConfigCache(),
        persistent=PersistentCache(),
        autotune=True,
    )
    kernel = MyKernel()
    chosen = selector.choose(Invocation(kernel, (a, b)), kernel)
    assert isinstance(chosen, MyConfig)
    assert len(selector.cache) == 1 and len(selector.persistent) == 1


def test_temporary_overrides():
    seen = []

    class OneArgument(Kernel[MyConfig, jnp.ndarray]):
        def run(self, x, *, cfg):
            seen.append(cfg)
            return x * 2

        def config_space(self, inv):
            return [MyConfig(16), MyConfig(32)]

    kernel, args = OneArgument(name="one"), jnp.ones(4)
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=True))
    my_custom_cache = ConfigCache()
    my_custom_cache.put("one", MyConfig(512))
    with overlay_cache(my_custom_cache):
        result = executor(kernel, args)
    assert seen[-1] == MyConfig(512)
    with policy_override(autotune=False):
        result = executor(kernel, args)
    assert seen[-1] == MyConfig(16) and len(executor.selector.cache) == 0
    np.testing.assert_array_equal(result, 2 * np.ones(4))


def test_manual_autotuning(a, b):
    kernel = MyKernel()
    inv = Invocation(kernel, (a, b))
    best_config = autotune(
        kernel, a, b, configs=kernel.config_space(inv), num_warmup=3, num_iters=10
    )
    assert isinstance(best_config, MyConfig)
    time_ms = benchmark(lambda: kernel(a, b), num_iters=100)
    assert time_ms > 0


def test_batch_autotuning(a, b):
    kernel = MyKernel()
    inv = Invocation(kernel, (a, b))
    record_invocation(kernel, inv)
    invocations = get_invocations()
    assert [i.key for i in invocations] == [inv.key]
    results = autotune_recorded(invocations)
    assert len(results) == 1 and isinstance(results[0].best, MyConfig)
    assert ConfigCache.from_results(results).get(inv.key) == results[0].best


def test_vmap_with_config(a, b):
    kernel = MyKernel()
    batched_a, batched_b = jnp.stack([a, 2 * a]), jnp.stack([b, b + 1])
    batched_result = vmap_with_config(kernel, in_axes=(0, 0))(batched_a, batched_b)
    expected = np.einsum("bij,bjk->bik", batched_a, batched_b)
    np.testing.assert_allclose(batched_result, expected, rtol=1e-4, atol=1e-4)


def test_pmap_with_config(a, b):
    kernel = MyKernel()
    n = jax.local_device_count()
    sharded_a, sharded_b = jnp.stack([a] * n), jnp.stack([b] * n)
    parallel_result = pmap_with_config(kernel, axis_name="devices")(sharded_a, sharded_b)
    expected = np.einsum("bij,bjk->bik", sharded_a, sharded_b)
    np.testing.assert_allclose(parallel_result, expected, rtol=1e-4, atol=1e-4)


def test_parameters():
    fwd = FwdParams(q_blocksize=128, kv_blocksize=256, num_warps=4, num_stages=2)
    bwd = BwdParams(q_blocksize=64, kv_blocksize=128)
    assert (fwd.num_stages, bwd.kv_blocksize, bwd.num_warps) == (2, 128, None)


def test_device_detection():
    assert device_kind() in ("gpu", "tpu", "cpu")
    assert get_device_platform() in ("triton", "pallas", "xla")
    assert isinstance(device_fingerprint(), str)


def test_sharding_utilities(a, b):
    assert sharding_fingerprint(a) is None
    key = default_key_builder_with_sharding(MyKernel(), (a, b), {"scale": 1.0})
    assert key == default_key_builder_with_sharding(MyKernel(), (a + 1, b), {"scale": 2.0})


def test_serialization():
    config = MyConfig(block_size=32)
    json_str = to_json(config)
    assert from_json(json_str, MyConfig) == config
    assert stable_json(config) == '{"algorithm":"default","block_size":32,"num_warps":4}'


def test_labels(a):
    @label("my_attention")
    def my_attention(q, k, v):
        return q @ k.T @ v

    args = (a, a, a)
    lowered = jax.jit(my_attention).lower(*args)
    assert "my_attention" in find_labels_in_lowered(lowered)
    labels = extract_labels_from_hlo_text(lowered.compile().as_text())
    assert "my_attention" in labels
    assert labels_to_configs(labels)["my_attention"] is None


def test_best_practices(a, b, tmp_path):
    class Sized(MyKernel):
        def heuristic_cfg(self, inv):
            # Consider input shapes
            q = inv.args[0]
            _batch, seq_len, _heads, _dim = q.shape

            # Larger sequences benefit from larger blocks
            if seq_len >= 2048:
                block = 256
            elif seq_len >= 512:
                block = 128
            else:
                block = 64

            return MyConfig(block_size=block)

    q = jax.ShapeDtypeStruct((1, 512, 2, 4), jnp.float32)
    executor = Executor()
    assert executor.choose_config(Sized(), q, q) == MyConfig(block_size=128)
    with jax.profiler.trace(str(tmp_path / "trace")):
        executor(MyKernel(), a, b).block_until_ready()
