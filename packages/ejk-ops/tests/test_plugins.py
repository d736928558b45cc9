"""A package of kernels with a fault is named, and harms nobody else."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigError,
    ConfigSelectorChain,
    EjkernelWarning,
    Executor,
    Invocation,
    KernelNotSupported,
    KernelRegistry,
    RegisteredKernel,
)
from ejkernel.ops.core.invocation import BoundCall
from ejktest.device import H200, on

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


@dataclass(frozen=True)
class Tiles:
    platform: str = "auto"
    tile: int = 1

    def __post_init__(self):
        if not isinstance(self.tile, int):
            raise ConfigError(f"tile={self.tile!r}")


class Tiled(RegisteredKernel[Tiles, jax.Array]):
    def run(self, x, *, cfg):
        raise NotImplementedError


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


class Package(EntryPoint):
    """One of a distribution, loaded already."""

    def load(self):
        found = {"ours:it": sound, "fancy:replace": replaces, "fancy:again": replaces_again}
        return found[self.value]


def replaces(registry):
    @registry.register("op", "xla", "any", 0, replace=True, notes=lambda inv: ["doubled"])
    def op(x, *, cfg=None):
        return 2 * x


def replaces_again(registry):
    replaces(registry)
    registry.register("op", "triton", "gpu", 0, supports=lambda inv: "x: no", replace=True)(double)


def double(x, *, cfg=None):
    return 2 * x


def entry_point(distribution, value, version="2.0"):
    point = Package("xla", value, "ejkernel.kernels")
    vars(point)["dist"] = SimpleNamespace(name=distribution, version=version)
    return point


def test_one_that_replaces_ours_is_named_with_its_distribution():
    ours = entry_point("ejk-kernels-xla", "ours:it", "0.1")
    points = (ours, entry_point("fancy", "fancy:replace"))
    registry = KernelRegistry(discover=lambda: points)
    kernel, x = Op("op", registry=registry), jnp.ones(3)
    text = "op/xla/any of fancy 2.0 replaces that of ejk-kernels-xla 0.1"
    with pytest.warns(EjkernelWarning) as caught:
        executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
        for _ in range(2):
            assert float(executor(kernel, x)[0]) == 2
        assert registry.get("op", "xla")(1) == 2
    assert [str(w.message) for w in caught] == [text]
    assert executor.explanation(kernel, x).notes == (text, "doubled")
    assert [i.replacement for i in registry.replacements()] == [text]


def test_one_that_replaces_ours_is_named_where_it_is_not_chosen():
    points = (entry_point("ejk-kernels-xla", "ours:it", "0.1"), entry_point("fancy", "fancy:again"))
    registry = KernelRegistry(discover=lambda: points)
    with pytest.warns(EjkernelWarning, match="of fancy 2.0 replaces"):
        told = Executor().explanation(Op("op", registry=registry), jnp.ones(3))
    text = "op/triton/gpu of fancy 2.0 replaces that of ejk-kernels-xla 0.1"
    assert dict(told.skipped)["op/triton/gpu"].endswith(f"({text})")


def test_what_a_caller_replaces_is_no_cause_of_a_warning():
    registry = KernelRegistry()
    sound(registry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replaces(registry)
        registry.get("op")
    assert registry.replacements() == []  # of the same module

    def op(x, *, cfg=None):
        return 3 * x

    op.__module__ = "notebook"
    for _ in range(2):
        registry.register("op", "xla", "any", replace=True)(op)
    (told,) = registry.replacements()
    assert told.replacement == f"op/xla/any of module notebook replaces that of module {__name__}"


@pytest.mark.parametrize("platform, backend", [("pallas", "gpu"), ("xla", "cpu")])
@pytest.mark.parametrize("failing", [fault, lambda inv: {"tile": "wide"}], ids=["raises", "not"])
def test_one_whose_heuristic_fails_is_passed_over(platform, backend, failing):
    registry = with_plugin(platform, backend, heuristic=failing)
    executor = Executor(ConfigSelectorChain(ConfigCache(), autotune=False))
    kernel, x = Tiled("op", registry=registry), jnp.ones(3)
    name = f"op/{platform}/{backend}"
    with (
        on(H200) if backend == "gpu" else contextlib.nullcontext(),
        pytest.warns(EjkernelWarning, match=f"{name} of module .* is passed over: ") as caught,
    ):
        for length in (3, 4):
            assert float(executor(kernel, jnp.ones(length))[0]) == 2
        told = executor.explanation(kernel, x)
    assert len(caught) == 1 and told.implementation == "op/xla/any"
    assert dict(told.skipped)[name].startswith("its heuristic failed: ")


def test_arguments_that_do_not_fit_are_no_fault_of_a_heuristic():
    registry = with_plugin("xla", "cpu", heuristic=lambda inv: {"tile": inv.arguments["x"].size})
    with warnings.catch_warnings(), pytest.raises(TypeError, match="missing a required argument"):
        warnings.simplefilter("error")
        kernel = Op("op", registry=registry)
        kernel.heuristic_cfg(BoundCall(kernel, ()))


def test_a_heuristic_that_fails_with_nobody_else_is_the_cause_of_the_error():
    registry = with_plugin("xla", "cpu", heuristic=fault)
    registry.register("op", "xla", "any", replace=True, supports=lambda inv: "x: no")(double)
    kernel = Op("op", registry=registry)
    with (
        pytest.warns(EjkernelWarning, match="passed over") as warned,
        pytest.raises(KernelNotSupported, match=r"its heuristic failed.*my own fault") as caught,
    ):
        Executor()(kernel, jnp.ones(3))
    assert len(warned) == 1 and str(caught.value.__cause__) == "my own fault"


@pytest.mark.parametrize("priority", ["high", None, True, math.inf, 1j])
def test_priorities_are_numbers(priority):
    registry = KernelRegistry()
    with pytest.raises(ValueError, match=r"op/xla/any: priority is .* expected a number"):
        registry.register("op", "xla", "any", priority)(lambda x, *, cfg=None: x)
    assert registry.list_algorithms() == []
