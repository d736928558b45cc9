"""A package of kernels with a fault is named, and harms nobody else."""

from __future__ import annotations

import math
import sys
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    EjkernelWarning,
    Executor,
    Invocation,
    KernelNotSupported,
    KernelRegistry,
    RegisteredKernel,
)

PLUGIN = """
import sys

def exits(registry):
    sys.exit(3)

def word(registry):
    register(registry, "high")

def register(registry, priority=100, **options):
    @registry.register("op", "cuda", "gpu", priority)
    def early(x, *, cfg=None):
        return x
    @registry.register("op", "xla", "any", priority, **options)
    def op(x, *, cfg=None):
        raise AssertionError("not chosen")
"""


def sound(registry):
    @registry.register("op", "triton", "gpu", 0)
    def on_gpu(x, *, cfg=None):
        return x

    @registry.register("op", "xla", "any", 0)
    def op(x, *, cfg=None):
        return x + 1


class Point(EntryPoint):
    """One that is loaded already."""

    def load(self):
        return sound


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    name = f"plugin_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PLUGIN)
    (tmp_path / f"{name}_exits.py").write_text("import sys\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("{}_exits:register", "SystemExit.*no licence"),
        ("{}:exits", r"SystemExit\(3\)"),
        ("{}:word", "priority is 'high', expected a number"),
    ],
)
@pytest.mark.parametrize("name", ["xla", "mine"])
def test_one_that_cannot_be_loaded(plugin, value, why, name):
    value = value.format(plugin)
    group = "ejkernel.kernels"
    points = (EntryPoint(name, value, group), Point("xla", "sound:it", group))
    registry = KernelRegistry(discover=lambda: points)
    with pytest.warns(EjkernelWarning, match=f"{plugin}.*{why}") as caught:
        assert registry.get("op")(1) == registry.get("op")(1) == 2
    assert len(caught) == 1
    ((point, error),) = registry.failures()
    assert point.value == value and isinstance(error, Exception)
    assert [i.name for i in registry.list_implementations("op")] == ["op/triton/gpu", "op/xla/any"]


def fault(*_):
    raise RuntimeError("my own fault")


class Op(RegisteredKernel[dict, jax.Array]):
    def run(self, x, *, cfg):
        raise NotImplementedError


def with_plugin(platform="pallas", backend="gpu", **options):
    registry = KernelRegistry()
    options = {"priority": 100, **options}

    @registry.register("op", "xla", "any", 0, candidates=lambda inv: [{"tile": 1}, {"tile": 2}])
    def op(x, *, cfg=None):
        return x + 1

    @registry.register("op", platform, backend, **options)
    def theirs(x, *, cfg=None):
        raise AssertionError("not chosen")

    return registry


def everywhere(monkeypatch):
    """As if every device ran every platform."""
    module = sys.modules[KernelRegistry.__module__]
    monkeypatch.setattr(module, "misplaced", lambda *_: None)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"supports": fault}, "RuntimeError: my own fault"),
        ({"supports": lambda inv: 0}, "supports gives 0, expected None or the reason"),
        ({"priority_for": fault}, "RuntimeError: my own fault"),
        ({"priority_for": lambda inv: "high"}, "'high', expected a number"),
        ({"priority_for": lambda inv: math.nan}, "nan, expected a number"),
    ],
)
def test_one_that_fails_when_it_is_asked(monkeypatch, options, why):
    registry = with_plugin(**options)
    everywhere(monkeypatch)
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    kernel = Op("op", registry=registry)
    x = jnp.ones(3)
    with pytest.warns(EjkernelWarning, match=f"op/pallas/gpu is not used.*{why}") as caught:
        assert float(executor(kernel, x)[0]) == 2
        told = executor.explain(kernel, x)
    assert len(caught) == 1 and told.implementation == "op/xla/any"
    assert why in dict(told.skipped)["op/pallas/gpu"]
    with pytest.raises(KernelNotSupported, match=why):
        executor(kernel, x, platform="pallas")


@pytest.mark.parametrize("what", ["candidates", "sample_inputs"])
def test_one_whose_tuning_fails(what):
    registry = with_plugin("xla", "cpu", **{what: fault})
    kernel = Op("op", registry=registry)
    inv = Invocation(kernel, (jnp.ones(3),))
    with pytest.warns(EjkernelWarning, match=f"{what} of op/xla/cpu.*my own fault"):
        configs = kernel.config_space(inv)
        given = kernel.sample_inputs(inv, np.random.default_rng(0))[1]
    assert [c["tile"] for c in configs if "tile" in c] == [1, 2]
    assert given["x"].shape == (3,)


@pytest.mark.parametrize("priority", ["high", None, True, math.inf, 1j])
def test_priorities_are_numbers(priority):
    registry = KernelRegistry()
    with pytest.raises(ValueError, match=r"op/xla/any: priority is .* expected a number"):
        registry.register("op", "xla", "any", priority)(lambda x, *, cfg=None: x)
    assert registry.list_algorithms() == []
