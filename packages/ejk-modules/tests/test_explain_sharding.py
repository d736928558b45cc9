"""Notes of ``explain`` on sharded calls."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import explain
from ejkernel.types import MaskInfo
from ejktest.calls import call

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


def test_a_call_by_specs():
    mesh = jax.make_mesh((2, 2, 2), ("pages", "tp", "dp"), axis_types=(AxisType.Auto,) * 3)
    c = call("page_attention", batch=4)
    arrays = {n: jnp.concatenate([x, x[:1]]) if "cache" in n else x for n, x in c.arrays.items()}
    specs = P(None, None, "tp"), P("pages", None, "tp"), P("pages", None, "tp")
    notes = explain("page_attention", **arrays, mesh=mesh, in_specs=specs).notes
    assert notes[:3] == (
        "pages over pages: each device attends to its own, merged by lse",
        "all-gather of the outputs with their lse, 224 bytes of each device, over pages",
        "sharded: heads over tp, kv_heads over tp",
    )
    assert "not sharded over dp: devices along it compute the same" in notes
    assert any("better layout, shares out the work: query" in note for note in notes)
    notes = explain("page_attention", **arrays, mesh=mesh, in_specs=(P("dp", None, "tp"),)).notes
    assert "sharded: batch over dp, heads over tp, kv_heads over tp" in notes
    c = call("flash_attention")
    qkv = [c.arrays[name] for name in ("query", "key", "value")]
    mask = MaskInfo.from_segments(jnp.zeros((2, 12), jnp.int32))
    sinks = {"softmax_aux": jnp.ones(3), "mask_info": mask}
    specs = (P("dp", None, "tp"),) * 3
    assert explain("flash_attention", *qkv, **sinks, mesh=mesh, in_specs=specs).notes == (
        "sharded: batch over dp, heads over tp, kv_heads over tp",
        "backward: all-reduce of the gradient of softmax_aux, 12 bytes, over dp and tp",
        "not sharded over pages: devices along it compute the same",
        "better layout, shares out the work: query with batch over dp and heads over tp and pages",
    )


def test_many_rows_over_many_devices_are_added_up():
    """The latent width is the size of no array."""
    mesh = jax.make_mesh((8,), ("pages",), axis_types=(AxisType.Auto,))
    shapes = {"query": (8, 64, 128, 576), "latent_cache": (64, 64, 576)}
    arrays = {n: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for n, shape in shapes.items()}
    shapes = {"context_lens": (8,), "block_tables": (8, 8)}
    arrays |= {n: jax.ShapeDtypeStruct(shape, jnp.int32) for n, shape in shapes.items()}
    where = {"mesh": mesh, "in_specs": (P(), P("pages"))}
    assert explain("mla_decode", **arrays, latent_dim=512, **where).notes[1] == (
        "all-reduce of the output with its weights, 128 MiB, and of the largest lse, 256 KiB, on "
        "each device, over pages"
    )
    arrays["query"] = jax.ShapeDtypeStruct((8, 1, 128, 576), jnp.bfloat16)
    assert explain("mla_decode", **arrays, latent_dim=512, **where).notes[1] == (
        "all-reduce of the output with its weights, 2 MiB, and of the largest lse, 4 KiB, on "
        "each device, over pages"
    )


def test_experts_under_plain_jit():
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,))
    c = call("grouped_matmul")
    rhs = jnp.concatenate([c.arrays["rhs"], c.arrays["rhs"][:1]])
    sizes = jnp.asarray([3, 0, 4, 1], jnp.int32)
    rhs = jax.device_put(rhs, NamedSharding(mesh, P("ep")))
    notes = explain("grouped_matmul", c.arrays["lhs"], rhs, sizes).notes
    assert notes[:2] == (
        "sharded: groups over ep",
        "all-reduce of the output, 192 bytes, over ep: devices have terms of it",
    )
