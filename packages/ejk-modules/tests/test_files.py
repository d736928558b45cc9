"""Recorded calls of the operations: what they hold is declared, in whatever process reads them."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.modules._table import operation_class
from ejkernel.ops import load_invocations, save_invocations
from ejkernel.ops.core.invocation import call_invocation
from ejkernel.ops.utils import allowed
from ejkernel.types import MaskInfo


def test_recorded_calls_come_back_where_only_ops_was_imported(tmp_path, monkeypatch):
    x = jax.ShapeDtypeStruct((1, 32, 2, 16), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    mask = MaskInfo.from_segments(ids).apply_causal()
    given = {"mask_info": mask, "precision": jax.lax.Precision.HIGHEST, "platform": "xla"}
    kernel = operation_class("flash_attention").shared()
    inv = call_invocation(kernel, (x, x, x), given).bound
    path = tmp_path / "calls.json"
    assert save_invocations(path, [inv]) == 1
    # in place: what the import below declares stays declared for the tests that follow
    for declared in (allowed._classes, allowed._offers):
        for name in [n for n in declared if n.startswith(("ejkernel.modules", "ejkernel.types"))]:
            monkeypatch.delitem(declared, name)
    monkeypatch.delitem(sys.modules, "ejkernel.modules._declared", raising=False)
    (found,) = load_invocations(path)
    assert found.kernel is kernel and found.key == inv.key
    assert found.abstract_kwargs["mask_info"].causal


def over_a_mesh(axis_type):
    """Calls of flash and ring attention over two devices."""
    mesh = jax.make_mesh((2,), ("sp",), axis_types=(axis_type,), devices=jax.devices()[:2])
    heads, rows = PartitionSpec(None, None, "sp"), PartitionSpec(None, "sp")
    shape = (1, 32, 2, 16)
    for name, spec, more in (
        ("flash_attention", heads, {"causal": True}),
        ("ring_attention", rows, {"axis_name": "sp"}),
    ):
        sharding = NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        placement = {"mesh": mesh, "in_specs": (spec,) * 3, "out_specs": spec}
        kernel = operation_class(name).shared()
        yield call_invocation(kernel, (x, x, x), {**more, **placement})
        if axis_type is AxisType.Explicit:
            yield call_invocation(kernel, (x, x, x), more)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_recorded_calls_over_a_mesh_are_those_of_a_shard(tmp_path, axis_type):
    calls = [inv.bound for inv in over_a_mesh(axis_type)]
    path = tmp_path / "calls.json"
    assert save_invocations(path, calls) == len(calls) >= 2
    loaded = load_invocations(path)
    assert [i.key for i in loaded] == [i.key for i in calls]
    for ours, theirs in zip(calls, loaded, strict=True):
        assert ours.arguments["query"].shape == theirs.arguments["query"].shape != (1, 32, 2, 16)
