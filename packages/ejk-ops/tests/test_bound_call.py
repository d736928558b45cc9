"""A call is bound once, and every hook receives the same BoundCall."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ejkernel.ops import Executor, Invocation, KernelRegistry, RegisteredKernel
from ejkernel.ops.core.invocation import BoundCall, call_invocation
from ejkernel.ops.utils import labels

X = jnp.ones((4, 2))


class Halved(RegisteredKernel):
    """Canonical arguments are halves."""

    binds = 0

    def run(self, x, *, scale=None, cfg):
        return self(x, scale=scale, cfg=cfg)

    def bind(self, args, kwargs):
        type(self).binds += 1
        (x,) = args
        return (x[:2],), {"scale": 1.0, **kwargs}


@pytest.fixture
def seen():
    return []


@pytest.fixture
def kernel(seen):
    registry = KernelRegistry()

    def hook(answer):
        return lambda call, *rng: seen.append(call) or answer

    @registry.register(
        "halved",
        "xla",
        "any",
        supports=hook(None),
        heuristic=hook({"tile": 1}),
        candidates=hook([{"tile": 1}, {"tile": 2}]),
        priority_for=hook(7),
        notes=hook(["a note"]),
    )
    def halved(x, *, scale=None, cfg=None):
        return x * scale

    Halved.binds = 0
    return Halved("halved", registry=registry)


def test_every_hook_receives_the_one_bound_call(kernel, seen):
    inv = call_invocation(kernel, (X,), {})
    kernel.heuristic_cfg(inv)
    kernel.config_space(inv)
    kernel.sample_inputs(inv, np.random.default_rng(0))
    assert kernel.registry.get("halved", inv=inv)(X, scale=1.0) is not None
    assert {type(call) for call in seen} == {BoundCall} and len(set(map(id, seen))) == 1
    call = seen[0]
    assert Halved.binds == 1 and call is inv.bound is call.bound
    assert call.arguments["x"].shape == (2, 2) and call.arguments["scale"] == 1.0
    assert call.made.args[0].shape == (4, 2) and call.key == inv.key


def test_a_call_is_bound_once_by_an_executor(kernel, seen):
    executor = Executor()
    assert executor(kernel, X).shape == (2, 2)
    assert Halved.binds == 1 and len(set(map(id, seen))) == 1
    executor(kernel, X)
    assert Halved.binds == 1
    executor.explain(kernel, X)
    assert Halved.binds == 2


def test_an_unhashable_config_needs_no_second_binding(kernel):
    assert Executor()(kernel, X, cfg={"tiles": np.ones(2)}).shape == (2, 2)
    assert Halved.binds == 1


def test_a_bound_call_is_immutable(kernel):
    call = call_invocation(kernel, (X,), {"platform": "XLA"}).bound
    for name in ("args", "route", "made", "key"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(call, name, None)
    with pytest.raises(TypeError):
        call.info["requested_platform"] = "triton"
    with pytest.raises(TypeError):
        call.arguments["x"] = X


def test_info_shows_what_the_executor_knows(kernel, monkeypatch):
    assert Invocation(kernel, (X,)).info == {"requested_platform": None}
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("data")
    placed = {"platform": "xla", "mesh": mesh, "in_specs": [spec]}
    info = call_invocation(kernel, (X,), placed).info
    assert info["requested_platform"] == "xla" and info["mesh_axes"] == (("data", 2),)
    assert info["in_specs"] == (spec,) and info["out_specs"] is None

    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "hash")
    lowered = jax.jit(lambda x: Executor()(kernel, x)).lower(X)
    (name,) = labels.find_labels_in_lowered(lowered)
    (call,) = labels.stamped_calls(name)
    assert call.info["implementation"] == "halved/xla/any" and call.info["platform"] == "xla"
    assert call.info["key"] == call.key == call_invocation(kernel, (X,), {}).key
