"""The seven tiers, and the keys under which configs are kept."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import (
    Executor,
    Invocation,
    Kernel,
    NoConfigError,
    PersistentCache,
    clear_invocations,
    default_key_builder_with_sharding,
    get_invocations,
    overlay_cache,
    policy_override,
)
from ejkernel.ops.utils.buckets import bucket_shape
from ejktest.tunable import Config, Scale, make_executor, scale_of


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    clear_invocations()


@pytest.fixture
def x():
    return jnp.arange(1.0, 5.0)


# ---- tiers --------------------------------------------------------------------------------------


def test_tiers_in_order(x, tmp_path):
    persistent = PersistentCache(tmp_path / "configs")
    executor, events = make_executor(persistent=persistent)
    kernel, chain = Scale(), executor.selector
    key = default_key_builder_with_sharding(kernel, (x,), {})

    def tier():
        explained = executor.explain(kernel, x)
        ran = scale_of(executor(kernel, x), x)
        assert explained.cfg == Config(ran)
        return explained.tier, ran

    assert tier() == ("heuristics", 1.0) and len(chain.cache) == 0
    persistent.put(key, Config(2.0))
    assert tier() == ("persistent", 2.0)
    assert chain.cache.get(key) == Config(2.0)
    chain.cache.put(key, Config(3.0))
    assert tier() == ("memory", 3.0)
    with overlay_cache({"Scale": Config(4.0)}):
        assert tier() == ("overlay", 4.0)
        with overlay_cache({key: Config(5.0)}):
            assert tier() == ("overlay", 5.0)
            assert scale_of(executor(kernel, x, cfg=Config(6.0)), x) == 6.0
            assert executor.explain(kernel, x, cfg=Config(6.0)).tier == "override"
        assert tier() == ("overlay", 4.0)
    assert tier() == ("memory", 3.0)
    assert set(events) == {"heuristics", "persistent", "memory", "overlay", "override"}


def test_autotune_tier_stores_and_heuristics_do_not(x, tmp_path):
    class Tuned(Scale):
        def run(self, x, *, cfg):
            return x * 1.0 + 0.0 * cfg.scale

        def config_space(self, inv):
            return [Config(2.0), Config(3.0)]

    persistent = PersistentCache(tmp_path / "configs")
    executor, events = make_executor(persistent=persistent, autotune=False)
    kernel = Tuned()
    executor(kernel, x)
    assert events == ["heuristics"] and not len(executor.selector.cache)
    with policy_override(autotune=True):
        assert executor.explain(kernel, x).tier == "autotune" and not len(executor.selector.cache)
        executor(kernel, x)
        assert events[1:] == ["autotune_start", *["autotune_candidate"] * 3, "autotune_finish"]
    key = executor.selector.cache.keys()[0]
    assert persistent.get(key) == executor.selector.cache.get(key)
    assert executor.explain(kernel, x).tier == "memory"


def test_a_listener_hears_of_every_eager_call(x):
    executor, events = make_executor(autotune=False)
    for _ in range(2):
        executor(Scale(), x)
        executor(Scale(), x, cfg=Config(2.0))
    assert events == ["heuristics", "override"] * 2
    key = executor.explain(Scale(), x).key
    executor.selector.cache.put(key, Config(3.0))
    executor(Scale(), x)
    executor(Scale(), x)
    assert events[4:] == ["memory"] * 2


def test_explicit_config_never_leaks(x):
    executor, _ = make_executor()
    kernel = Scale()
    for _ in range(2):
        assert scale_of(executor(kernel, x, cfg=Config(7.0)), x) == 7.0
        assert scale_of(executor(kernel, x), x) == 1.0
        assert scale_of(executor(kernel, x, cfg={"scale": 8.0}), x) == 8.0
        assert scale_of(jax.jit(lambda x: executor(kernel, x, cfg=Config(9.0)))(x), x) == 9.0
    assert len(executor.selector.cache) == 0
    assert executor.choose_config(kernel, x, cfg=Config(7.0)) == Config(7.0)


def test_changes_reach_calls_already_compiled(x, monkeypatch):
    executor, _ = make_executor(autotune=None)
    kernel = Scale()
    assert scale_of(executor(kernel, x), x) == 1.0
    overlay = {"Scale": Config(2.0)}
    with overlay_cache(overlay):
        assert scale_of(executor(kernel, x), x) == 2.0
        overlay["Scale"] = Config(3.0)
        assert scale_of(executor(kernel, x), x) == 3.0
    kernel.heuristic_cfg = lambda inv: Config(4.0)
    assert scale_of(executor(kernel, x), x) == 4.0
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "nonsense")
    with pytest.raises(ValueError, match="EJKERNEL_AUTOTUNE_POLICY"):
        executor(kernel, x)


def test_no_config_error_tells_what_each_tier_said(x):
    class Empty(Kernel[Config, jax.Array]):
        def run(self, x, *, cfg):
            return x

        def config_space(self, inv):
            return []

    executor, events = make_executor()
    with pytest.raises(NoConfigError) as error:
        executor(Empty(), x)
    text = str(error.value)
    key = default_key_builder_with_sharding(Empty(), (x,))
    assert "'Empty'" in text and key in text
    for tier in ("override", "overlay", "memory", "persistent", "autotune", "heuristics"):
        assert f"\n  {tier}: " in text
    assert events == ["error"]
    assert executor.explain(Empty(), x).tier == "error"


def test_kernel_without_tunables_runs_with_none(x):
    class Plain(Kernel):
        def run(self, x, *, cfg):
            assert cfg is None
            return x + 1

    executor, events = make_executor(autotune=True)
    np.testing.assert_array_equal(executor(Plain(), x), np.arange(2.0, 6.0))
    assert events == ["heuristics"]


def test_any_chooser_serves(x):
    class Fixed:
        def choose(self, inv, kernel):
            return Config(float(inv.args[0].shape[0]))

    executor = Executor(Fixed())
    assert scale_of(executor(Scale(), x), x) == 4.0
    assert scale_of(executor(Scale(), x[:2]), x) == 2.0
    assert executor.explain(Scale(), x).cfg == Config(4.0)


# ---- keys ---------------------------------------------------------------------------------------


def test_keys_see_structure_not_values(x):
    key = default_key_builder_with_sharding
    kernel = Scale()
    same = key(kernel, (x,), {})
    assert same == key(kernel, (x + 1,), {"power": 1}) == key(kernel, (), {"x": np.asarray(x)})
    assert same == Invocation(kernel, (x,)).key
    others = [
        key(kernel, (x[:2],), {}),
        key(kernel, (x.astype(jnp.bfloat16),), {}),
        key(kernel, (x,), {"power": 2}),
        key(kernel, (x,), {"power": True}),
        key(kernel, (x,), {"platform": "xla"}),
        key(Scale(version=2), (x,), {}),
        key(Scale("other"), (x,), {}),
    ]
    assert len({same, *others}) == 8
    assert key(kernel, (x,), {"power": 0.5}) == key(kernel, (x,), {"power": 1.5})
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("x",))
    assert key(kernel, (jax.device_put(x, NamedSharding(mesh, P("x"))),)) != same
    assert key(kernel, (jax.device_put(x, NamedSharding(mesh, P())),)) == same


def test_two_lengths_of_one_bucket_share_one_entry():
    class Bucketed(Scale):
        def bucket(self, inv):
            return {"x": bucket_shape(inv.arguments["x"].shape, (0,))}

    executor, _ = make_executor()
    kernel = Bucketed()
    executor.selector.cache.put(
        default_key_builder_with_sharding(kernel, (jnp.ones(40),)), Config(2.0)
    )
    for length in (33, 40, 64):
        assert executor.explain(kernel, jnp.ones(length)).tier == "memory"
        assert scale_of(executor(kernel, jnp.ones(length)), jnp.ones(1)) == 2.0
    assert executor.explain(kernel, jnp.ones(65)).tier == "heuristics"


def test_eager_jit_and_abstract_calls_share_a_key(x, monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, _ = make_executor()
    executor(Scale(), x)
    jax.jit(lambda x: executor(Scale(), x))(x)
    executor(Scale(), np.asarray(x))
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
    jax.eval_shape(lambda x: executor(Scale(), x), abstract)
    (inv,) = get_invocations()
    assert inv.abstract_args == (abstract,) == inv.args
    assert executor.explain(Scale(), abstract).key == inv.key
    clear_invocations()
    executor(Scale(), x)
    assert len(get_invocations()) == 1


# ---- threads ------------------------------------------------------------------------------------


def test_threads_tune_a_key_once(x):
    tunings = []

    class Slow(Scale):
        def run(self, x, *, cfg):
            return x

        def config_space(self, inv):
            return [Config(2.0), Config(3.0)]

        def sample_inputs(self, inv, rng):
            tunings.append(1)
            return super().sample_inputs(inv, rng)

    executor, _ = make_executor(autotune=True)
    kernel, errors = Slow(), []

    def work():
        try:
            executor(kernel, x)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(tunings) == 1
