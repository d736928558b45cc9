"""Calls over several GPUs equal those on one: ``-m multigpu``, on a machine that has two."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel.modules as modules
from ejktest.at_size import BOUND, relative
from ejktest.transfers import transfers
from ejktest.transforms import with_pullback

GPUS = [device for device in jax.devices() if device.platform == "gpu"]
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs"),
]


def mesh_of(axis):
    return Mesh(np.array(GPUS[:2]), (axis,))


def drawn(heads=8, kv_heads=2, length=1024):
    """The cotangent, q, k and v, on the first GPU."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, heads, kv_heads, kv_heads)
    shapes = [(2, length, n, 128) for n in counts]
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


def same(found, expected):
    """Up to the rounding of sums that XLA makes in another order."""
    first = [jax.device_put(x, GPUS[0]) for x in jax.tree.leaves(found)]
    errors = list(map(relative, first, jax.tree.leaves(expected)))
    assert max(errors) <= BOUND["bfloat16"], errors


@pytest.mark.parametrize("platform", ["triton", "pallas", "xla"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_attention_over_batch_or_heads(axis, platform):
    """Arrays that lie on both GPUs, by ``mesh=``, inside a shard_map and under plain ``jit``."""
    arrays, mesh = drawn(), mesh_of(axis)
    spec = P("dp") if axis == "dp" else P(None, None, "tp")
    plain = lambda q, k, v: modules.flash_attention(q, k, v, causal=True, platform=platform)  # noqa: E731
    expected = jax.jit(with_pullback(plain))(*arrays)
    spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]

    def on_mesh(q, k, v):
        return modules.flash_attention(
            q, k, v, causal=True, platform=platform, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
        )

    by_shard_map = jax.shard_map(plain, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    for call in (on_mesh, by_shard_map, plain):
        found = jax.jit(with_pullback(call))(*spread)
        assert {shard.device for shard in found[0].addressable_shards} == set(GPUS[:2])
        same(found, expected)


@pytest.mark.parametrize("platform", ["triton", "pallas"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_plain_jit_gathers_nothing(axis, platform):
    mesh, spec = mesh_of(axis), P("dp") if axis == "dp" else P(None, None, "tp")
    spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x in drawn()]
    attend = lambda q, k, v: modules.flash_attention(q, k, v, causal=True, platform=platform)  # noqa: E731
    text = jax.jit(with_pullback(attend)).lower(*spread).compile().as_text()
    assert "all-gather" not in text
    assert "all-reduce" not in text


def test_plain_jit_of_a_server_and_of_matrices():
    """Heads of a paged cache, and columns of grouped matrices, on two GPUs."""
    rng, mesh = np.random.default_rng(1), mesh_of("tp")

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    lengths = jnp.asarray([700, 3, 512, 64], jnp.int32)
    pages = jnp.asarray(rng.permutation(64).reshape(4, 16), jnp.int32)
    heads = P(None, None, "tp")

    def decode(q, k, v):
        return modules.page_attention(q, k, v, lengths, pages)

    def multiply(lhs, rhs):
        sizes = jnp.asarray([100, 0, 300, 17, 128, 256, 200, 23], jnp.int32)
        return modules.grouped_matmul(lhs, rhs, sizes)

    cache = normal(64, 64, 4, 128), normal(64, 64, 4, 128)
    for call, arrays, specs in (
        (decode, (normal(4, 1, 32, 128), *cache), (heads,) * 3),
        (multiply, (normal(1024, 256), normal(8, 256, 512)), (P(), heads)),
    ):
        expected = jax.jit(call)(*arrays)
        pairs = zip(arrays, specs, strict=True)
        spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
        compiled = jax.jit(call).lower(*spread).compile()
        assert "all-gather" not in compiled.as_text()
        same([compiled(*spread)], [expected])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_ring(layout):
    arrays, mesh = drawn(), mesh_of("sp")
    expected = jax.jit(with_pullback(partial(modules.flash_attention, causal=True)))(*arrays)
    zigzag = layout == "zigzag"
    there = (lambda x: modules.zigzag_shard(x, 2)) if zigzag else (lambda x: x)
    back = (lambda x: modules.zigzag_unshard(x, 2)) if zigzag else (lambda x: x)

    def ring(q, k, v):
        out = modules.ring_attention(
            *map(there, (q, k, v)), axis_name="sp", mesh=mesh, causal=True, layout=layout
        )
        return back(out)

    spread = [jax.device_put(x, NamedSharding(mesh, P(None, "sp"))) for x in arrays]
    same(jax.jit(with_pullback(ring))(*spread), expected)


@pytest.mark.parametrize("platform", ["triton", "pallas"])
def test_plain_jit_of_experts(platform):
    """Each GPU multiplies with the matrices that it holds; the output is summed, no more."""
    rng, mesh = np.random.default_rng(2), mesh_of("ep")
    sizes = jnp.asarray([100, 0, 300, 17, 128, 256, 200, 23], jnp.int32)
    shapes = (1024, 256), (8, 256, 512), (1024, 512)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]

    @jax.jit
    def run(lhs, rhs, dout):
        multiply = lambda *x: modules.grouped_matmul(*x, sizes, platform=platform)  # noqa: E731
        out, back = jax.vjp(multiply, lhs, rhs)
        return out, *back(dout)

    expected = run(*arrays)
    specs = P(), P("ep"), P()
    spread = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    compiled = run.lower(*spread).compile()
    assert "all-gather" not in compiled.as_text()
    found = compiled(*spread)
    assert found[2].sharding.is_equivalent_to(spread[1].sharding, 3)
    same(found, expected)


def test_latent_pages_on_two():
    """Half of a context on each GPU, merged: as on one."""
    rng, mesh = np.random.default_rng(3), mesh_of("pages")
    q, cache = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((2, 128, 576), (256, 64, 576))
    )
    tables = jnp.asarray(rng.permutation(256).reshape(2, 128), jnp.int32)
    lengths = jnp.asarray([8000, 4321], jnp.int32)
    expected = jax.jit(modules.mla_decode)(q, cache, lengths, tables)
    specs = P(), P("pages"), P(), P()
    spread = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((q, cache, lengths, tables), specs, strict=True)
    ]
    run = jax.jit(lambda *x: modules.mla_decode(*x, mesh=mesh, in_specs=specs))
    compiled = run.lower(*spread).compile()
    (sent,) = transfers(compiled.as_text())  # the outputs and their lse, of both
    assert (sent.kind, sent.size) == ("all-gather", 2 * 2 * 128 * (512 * 2 + 4))
    same([compiled(*spread)], [expected])


@pytest.mark.parametrize("axis", ["heads", "pages"])
def test_a_server_writes_its_part_of_the_cache(axis):
    rng, mesh = np.random.default_rng(4), mesh_of("x")
    tokens, n, columns = 64, 8, 16

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    rows = normal(tokens, 32, 128), normal(tokens, 8, 128), normal(tokens, 8, 128)
    cache = normal(n * columns, 64, 16, 128)
    starts = np.array([0, 1, 2, 3, 4, 5, 6, 7, 40], np.int32)
    lengths = np.array([700, 3, 512, 64, 1, 1000, 65, 90], np.int32)
    tables = rng.permutation(n * columns).reshape(n, columns).astype(np.int32)
    others = lengths, tables, starts, np.array([7, 7, 8], np.int32)
    spec = P(None, "x") if axis == "heads" else P()
    pool = P(None, None, "x") if axis == "heads" else P("x")
    expected = jax.jit(modules.ragged_page_attention_v3)(*rows, cache, *others)
    spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x in rows]
    placed = jax.device_put(cache, NamedSharding(mesh, pool))
    run = jax.jit(
        lambda *x: modules.ragged_page_attention_v3(
            *x, *others, mesh=mesh, in_specs=(spec, spec, spec, pool)
        ),
        donate_argnums=3,
    )
    compiled = run.lower(*spread, placed).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.nbytes // 2
    same(compiled(*spread, placed), expected)


def test_grouped_product_of_matrices_on_two():
    """Each GPU has half of the matrices, and the rows of all: its share is added to the others'."""
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((1024, 256)), jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((8, 256, 512)), jnp.bfloat16)
    sizes = jnp.asarray([100, 0, 300, 17, 128, 256, 200, 23], jnp.int32)

    @jax.jit
    def run(lhs, rhs):
        def product(rhs):
            first = jax.lax.axis_index("ep") * 4
            out = modules.grouped_matmul(lhs, rhs, sizes, group_offset=first)
            return jax.lax.psum(out.astype(jnp.float32), "ep")

        return jax.shard_map(
            product, mesh=mesh_of("ep"), in_specs=P("ep"), out_specs=P(), check_vma=False
        )(rhs)

    expected = modules.grouped_matmul(lhs, rhs, sizes)
    rhs = jax.device_put(rhs, NamedSharding(mesh_of("ep"), P("ep")))
    lhs = jax.device_put(lhs, NamedSharding(mesh_of("ep"), P()))
    same([run(lhs, rhs)], [expected])
