"""A kernel whose implementations come from the registry."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    Executor,
    Invocation,
    KernelNotSupported,
    KernelRegistry,
    OpConfig,
    PersistentCache,
    RegisteredKernel,
    default_key_builder_with_sharding,
    interpret_mode,
)
from ejkernel.ops.params import tile_field
from ejkernel.ops.utils.buckets import bucket_shape
from ejktest.device import H200, on

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the choice on a CPU")


@dataclass(frozen=True)
class TileConfig(OpConfig):
    tile: int | None = tile_field()


def candidates(inv):
    return [{"tile": t} for t in (16, 32, 17)]  # 17 is illegal and left out


def make(registry):
    @registry.register(
        "double",
        "xla",
        "any",
        heuristic=lambda inv: {"tile": 16 if inv.arguments["x"].shape[0] < 64 else 32},
        candidates=candidates,
        sample_inputs=lambda inv, rng: ((), {"x": rng.normal(size=inv.arguments["x"].shape)}),
    )
    def xla(x, factor=None, *, cfg=None):
        assert factor == 2.0  # canonical
        return x * factor

    @registry.register(
        "double",
        "pallas",
        "tpu",
        100,
        supports=lambda inv: None if inv.arguments["x"].ndim == 1 else "x must have rank 1",
        candidates=candidates,
    )
    def pallas(x, factor=None, *, cfg=None):
        return x * factor + 1

    class Double(RegisteredKernel[TileConfig, jax.Array]):
        algorithm = "double"

        def run(self, x, factor=None, *, cfg):
            raise AssertionError("implementations run")

        def bind(self, args, kwargs):
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["x"].ndim > 2:
                raise TypeError("x must have rank 1 or 2")
            bound.arguments["factor"] = 2.0
            return (), dict(bound.arguments)

        def bucket(self, inv):
            return {"x": bucket_shape(inv.arguments["x"].shape, (0,))}

    return Double(registry=registry)


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    return make(KernelRegistry())


X = jnp.ones(40)


def add(kernel, platform, priority, **options):
    @kernel.registry.register("double", platform, "gpu", priority, **options)
    def double(x, factor=None, *, cfg=None):
        return x * factor

    return double


def test_why_the_others_were_not_chosen(kernel):
    add(kernel, "triton", 60)
    add(kernel, "cuda", 60)

    def reasons(**given):
        with on(H200):
            return dict(Executor().explanation(kernel, X, **given).skipped)

    def of(other, **given):
        (reason,) = (why for name, why in reasons(**given).items() if other in name)
        return reason

    assert "priority 60, this" in of("xla")
    assert of("xla", platform="triton") == "platform='triton' was asked for"
    assert of("triton", cfg={"platform": "xla"}) == "platform='xla' was asked for"
    assert not any("asked for" in why for why in reasons().values())


def test_priority_may_depend_on_the_call(kernel):
    def short_last(inv):
        return 20 if inv.arguments["x"].shape[0] < 100 else 80

    cuda = add(kernel, "cuda", 80, priority_for=short_last)
    add(kernel, "triton", 60)
    with on(H200):
        assert kernel.registry.get("double") is cuda  # of no call in particular
        for x, platform, other in ((X, "triton", "cuda"), (jnp.ones(200), "cuda", "triton")):
            found = Executor().explanation(kernel, x)
            assert found.platform == platform
            (why,) = (why for name, why in found.skipped if other in name)
            ours, theirs = {"triton": (60, 20), "cuda": (80, 60)}[platform]
            which = " for this call" if other == "cuda" else ""
            assert why == f"double/{platform}/gpu has priority {ours}, this {theirs}{which}"


def test_explain_says_what_the_chosen_implementation_notes(kernel):
    add(kernel, "triton", 60, notes=lambda inv: [f"{inv.arguments['x'].shape[0]} at once"])
    add(kernel, "cuda", 50, notes=lambda inv: ["not chosen, not asked"])
    with on(H200):
        found = Executor().explanation(kernel, X)
    assert found.notes == ("40 at once",) and "note            40 at once" in str(found)


def test_dispatch_and_configs(kernel):
    executor = Executor()
    np.testing.assert_allclose(executor(kernel, X), 2)
    assert executor.choose_config(kernel, X) == TileConfig("xla", tile=16)
    assert executor.choose_config(kernel, jnp.ones(64)) == TileConfig("xla", tile=32)
    inv = Invocation(kernel, (X,))
    assert kernel.heuristic_cfg(inv).tile == 16
    assert [c.tile for c in kernel.config_space(inv)] == [16, 32]
    assert kernel.supports(X) and kernel.supports(platform="pallas")
    assert not kernel.supports(X, platform="pallas")
    assert kernel.supports(X, cfg={"tile": 16}) and kernel.supports(X, cfg={"platform": "xla"})
    assert "tpu" in kernel.supports(X, cfg={"platform": "pallas"}).reason
    assert "contradict" in kernel.supports(X, platform="xla", cfg={"platform": "pallas"}).reason
    assert "tile=17" in kernel.supports(X, cfg={"tile": 17}).reason
    assert "TileConfig" in kernel.supports(X, cfg=3).reason
    with pytest.raises(KernelNotSupported, match="tpu"):
        executor(kernel, X, platform="pallas")
    with pytest.raises(ConfigError, match="tile"):
        executor(kernel, X, cfg={"tile": 17})
    assert jax.vmap(jax.grad(lambda x: executor(kernel, x[None])[0]))(X)[0] == 2


def test_explain_names_what_was_skipped(kernel):
    explained = Executor().explain(kernel, X)
    assert explained.implementation == "double/xla/any" and explained.platform == "xla"
    ((name, why),) = explained.skipped
    assert name == "double/pallas/tpu" and "tpu" in why
    text = str(explained)
    for part in ("double/xla/any", "TileConfig", "heuristics", "double/pallas/tpu", why):
        assert part in text
    refused = Executor().explain(kernel, X, platform="pallas")
    assert refused.tier == "error" and refused.implementation is None and refused.error


def test_interpreted_platform_is_forced_only(kernel):
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=True))
    with interpret_mode():
        np.testing.assert_allclose(executor(kernel, X, platform="pallas"), 3)
        assert executor.choose_config(kernel, X).platform == "xla"
        with pytest.raises(KernelNotSupported, match="rank 1"):
            executor(kernel, X[None], platform="pallas")
    with pytest.raises(KernelNotSupported):
        executor(kernel, X, platform="pallas")


def test_registering_reaches_calls_already_compiled(kernel):
    executor = Executor()
    np.testing.assert_allclose(executor(kernel, X), 2)

    @kernel.registry.register("double", "xla", "any", replace=True)
    def other(x, factor=None, *, cfg=None):
        return x * 5

    np.testing.assert_allclose(executor(kernel, X), 5)


def test_stored_configs_of_an_absent_platform_are_passed_over(kernel, tmp_path):
    persistent = PersistentCache(tmp_path / "c")
    key = default_key_builder_with_sharding(kernel, (X,))
    persistent.put(key, TileConfig("pallas", tile=32))
    executor = Executor(ConfigSelectorChain(persistent=persistent, autotune=False))
    explained = executor.explain(kernel, X)
    assert explained.tier == "heuristics" and "not used" in dict(explained.tiers)["persistent"]
    np.testing.assert_allclose(executor(kernel, X), 2)


def test_shipped_table_serves_the_nearest_bucket(kernel, tmp_path):
    tuned = PersistentCache(tmp_path / "tuned.json")
    chain = ConfigSelectorChain(persistent=tuned, autotune=True)
    for length in (128, 4096):
        Executor(chain)(kernel, jnp.ones(length))
    assert len(tuned) == 2
    content = json.loads((tmp_path / "tuned.json").read_text())
    entries = list(content["entries"].values())
    entries[0]["config"]["tile"], entries[1]["config"]["tile"] = 64, 512
    (tmp_path / "shipped.json").write_text(json.dumps({**content, "provenance": {}}))

    registry = KernelRegistry()
    user = make(registry)
    registry.add_config_table(tmp_path / "shipped.json")
    executor = Executor(ConfigSelectorChain(autotune=False))
    assert executor.choose_config(user, jnp.ones(300)).tile == 64
    assert executor.choose_config(user, jnp.ones(9000)).tile == 512
    explained = executor.explain(user, jnp.ones(2000))
    assert explained.tier == "persistent" and explained.cfg.tile == 512
    assert executor.explain(user, jnp.ones(300, jnp.bfloat16)).tier == "heuristics"
    assert executor.explain(user, jnp.ones((300, 2))).tier == "heuristics"


def test_binding_errors_come_at_trace_time(kernel):
    with pytest.raises(TypeError, match="rank 1 or 2"):
        jax.eval_shape(lambda x: Executor()(kernel, x), jnp.ones((1, 1, 1)))
    refused = kernel.supports(jnp.ones((1, 1, 1)))
    assert "rank 1 or 2" in refused.reason and refused.argument == "x"


def test_a_kernel_without_run_says_which_signature_is_missing():
    class Bare(RegisteredKernel):
        algorithm = "double"

    registry = KernelRegistry()
    text = r"Bare defines no run method.*'double': add def run\(self, \.\.\., \*, cfg\)"
    with pytest.raises(TypeError, match=text):
        Bare(registry=registry)(jnp.ones(3))
    registry.register_lazy("double", "triton", "gpu", 100, target="no.such.module:double")

    @registry.register("double", "xla", "any")
    def double(x, factor: float = 2.0, *, axis=None, cfg=None, **more):
        return x * factor

    signature = "run(self, x, factor=2.0, *, axis=None, cfg, **more), as double/xla/any takes them"
    for call in (lambda k: k(jnp.ones(3)), lambda k: Executor().explanation(k, jnp.ones(3))):
        with pytest.raises(TypeError, match=re.escape(signature)):
            call(Bare(registry=registry))
    assert signature in Bare(registry=registry).supports(jnp.ones(3)).reason
