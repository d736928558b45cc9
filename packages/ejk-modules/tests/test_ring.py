"""ring_attention on global and on local arrays equals flash_attention on one device."""

# ruff: noqa: RUF043 (messages are patterns)

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel.modules as modules
from ejkernel.ops import InvalidArgument
from ejkernel.types import MaskInfo
from ejktest.grids import cover
from ejktest.transforms import with_pullback

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
COLLECTIVES = re.compile(
    r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
)
SEQ = P(None, "sp", None, None)


def ring(count, **axes):
    shape = {"sp": count, **axes}
    devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))])
    return Mesh(devices.reshape(*shape.values()), tuple(shape))


def qkv(batch=2, length=32, heads=4, kv_heads=2, dim=8):
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = [(batch, length, heads, dim)] + [(batch, length, kv_heads, dim)] * 2
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def assert_same(a, b):
    for x, y in zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=3e-5, atol=3e-5)


def test_the_three_ways_to_give_the_axis():
    q, k, v = qkv(batch=1, length=16, heads=2, kv_heads=1)
    mesh, options = ring(4), dict(axis_name="sp", causal=True)
    expected = modules.flash_attention(q, k, v, causal=True)
    assert_same(modules.ring_attention(q, k, v, mesh=mesh, **options), expected)
    with mesh:
        assert_same(modules.ring_attention(q, k, v, **options), expected)
    with jax.set_mesh(mesh):
        jitted = jax.jit(lambda q: modules.ring_attention(q, k, v, **options))
        assert_same(jitted(q), expected)
    local = jax.shard_map(
        lambda q, k, v: modules.ring_attention(q, k, v, **options),
        mesh=mesh, in_specs=(SEQ,) * 3, out_specs=SEQ, check_vma=False,
    )  # fmt: skip
    assert_same(local(q, k, v), expected)


@pytest.mark.parametrize(
    ("strategy", "kinds"), [("ring", {"collective-permute"}), ("ulysses", {"all-to-all"})]
)
def test_zigzag_under_plain_jit(strategy, kinds):
    """Arrays say on which mesh they lie; rows and heads over its other axes stay where they are."""
    cotangent = jax.random.normal(jax.random.key(3), (4, 32, 8, 8))
    arrays = (cotangent, *qkv(batch=4, heads=8, kv_heads=4))
    options = {"causal": True, "sliding_window": (20, 0)}
    ours = partial(
        modules.ring_attention, axis_name="sp", layout="zigzag",
        cfg={"context_parallel": strategy}, **options,
    )  # fmt: skip
    spec = P("dp", "sp", "tp")
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(AxisType.Auto,) * 3)
    expected = jax.jit(with_pullback(partial(modules.flash_attention, **options)))(*arrays)
    ordered = [modules.zigzag_shard(x, 2) for x in arrays]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in ordered]
    compiled = jax.jit(with_pullback(ours)).lower(*placed).compile()
    assert set(COLLECTIVES.findall(compiled.as_text())) == kinds
    found = compiled(*placed)
    assert {x.sharding.spec for x in jax.tree.leaves(found)} == {spec}
    explicit = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(explicit):
        typed = [jax.device_put(x, NamedSharding(explicit, spec)) for x in ordered]
        for result in (found, jax.jit(with_pullback(ours))(*typed)):
            whole = map(np.asarray, jax.tree.leaves(result))
            assert_same([modules.zigzag_unshard(x, 2) for x in whole], expected)
    assert_same(modules.zigzag_unshard(ours(*placed[1:]), 2), expected[0])


@pytest.mark.parametrize("layout", cover(["contiguous", "zigzag"], "zigzag"))
def test_options_and_gradients(layout):
    q, k, v = qkv()
    ids = jnp.asarray([[0] * 9 + [1] * 18 + [-1] * 5, [2] * 32])
    sinks = jnp.linspace(-1.0, 1.0, 4).reshape(4, 1)
    bias = jax.random.normal(jax.random.key(2), (1, 4, 32, 32))
    options = dict(causal=True, sliding_window=11, logits_soft_cap=5.0, dropout_prob=0.2)
    options |= dict(dropout_seed=3, return_lse=True)
    shard = modules.zigzag_shard if layout == "zigzag" else lambda x, n, axis=1: x
    unshard = modules.zigzag_unshard if layout == "zigzag" else lambda x, n, axis=1: x
    mesh = ring(2, dp=2, tp=2)

    def ours(q, k, v, sinks, bias):
        bias = shard(shard(bias, 2, 2), 2, 3)
        out = modules.ring_attention(
            *(shard(x, 2) for x in (q, k, v)), bias, sinks, axis_name="sp", mesh=mesh,
            q_segment_ids=shard(ids, 2), layout=layout, in_specs=(P("dp", "sp", "tp"),), **options,
        )  # fmt: skip
        return jax.tree_util.tree_map(lambda x: unshard(x, 2), out)

    def theirs(q, k, v, sinks, bias):
        mask = MaskInfo.from_segments(ids)
        return modules.flash_attention(q, k, v, bias, softmax_aux=sinks, mask_info=mask, **options)

    arrays = ((jnp.cos(q), jnp.ones(q.shape[:3])), q, k, v, sinks, bias)
    assert_same(jax.jit(with_pullback(ours))(*arrays), jax.jit(with_pullback(theirs))(*arrays))


@pytest.mark.parametrize("strategy", ["ring", "ring_packed", "all_gather", "ulysses"])
def test_gradients_of_a_bias_with_64_bit_types(strategy):
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in qkv(batch=1, length=16))
        bias = jax.random.normal(jax.random.key(2), (1, 4, 16, 16), jnp.float64)
        config = {"context_parallel": strategy}
        ours = partial(modules.ring_attention, axis_name="sp", mesh=ring(2), cfg=config)

        def gradient(call):
            def loss(bias):
                return (call(q, k, v, bias, sliding_window=(5, 3)) ** 2).sum()

            return jax.jit(jax.grad(loss))(bias)

        expected = gradient(modules.flash_attention)
        np.testing.assert_allclose(gradient(ours), expected, rtol=1e-10, atol=1e-12)


def test_mask_info_is_sharded_with_its_sequence():
    q, k, v = qkv()
    mask = MaskInfo.from_segments(jnp.asarray([[0] * 13 + [1] * 19]))
    dense = mask.materialize_attention_mask()
    expected = modules.flash_attention(q, k, v, mask_info=mask)
    for given in (mask, dense):
        out = modules.ring_attention(q, k, v, axis_name="sp", mesh=ring(4), mask_info=given)
        assert_same(out, expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_zigzag_is_a_permutation(axis):
    x = jnp.arange(2 * 16 * 16).reshape(16, 2, 16) if axis != 1 else jnp.arange(48).reshape(3, 16)
    for n in (1, 2, 4, 8):
        there = modules.zigzag_shard(x, n, axis)
        assert (modules.zigzag_unshard(there, n, axis) == x).all()
    chunks = modules.zigzag_shard(jnp.arange(8)[None], 4)[0]
    assert chunks.tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    with pytest.raises(InvalidArgument, match="axis_size: expected an integer, given float 2.0"):
        modules.zigzag_shard(x, 2.0, axis)
    with pytest.raises(InvalidArgument, match="axis: expected an integer, given bool True"):
        modules.zigzag_unshard(x, 2, True)


def test_bad_rings():
    q, k, v = qkv()
    with pytest.raises(
        ValueError, match="axis_name: 'sp' is not bound.*shard_map.*mesh=.*set_mesh"
    ):
        modules.ring_attention(q, k, v, axis_name="sp")
    with pytest.raises(ValueError, match="axis_name: 'xx' .*the mesh has sp"):
        modules.ring_attention(q, k, v, axis_name="xx", mesh=ring(2))
    with pytest.raises(InvalidArgument, match="query: expected a length divisible by 4"):
        modules.ring_attention(q[:, :30], k, v, axis_name="sp", mesh=ring(4))
    with pytest.raises(InvalidArgument, match="key: expected a length divisible by 8"):
        modules.ring_attention(
            q, k[:, :28], v[:, :28], axis_name="sp", mesh=ring(4), layout="zigzag"
        )
    with pytest.raises(ValueError, match="layout"):
        modules.ring_attention(q, k, v, axis_name="sp", mesh=ring(2), layout="striped")
    with pytest.raises(ValueError, match="kv_segment_ids: given without q_segment_ids"):
        ids = jnp.zeros((2, 32), jnp.int32)
        modules.ring_attention(q, k, v, axis_name="sp", mesh=ring(2), kv_segment_ids=ids)
    with pytest.raises(InvalidArgument, match="bias: expected all 32 keys"):
        bias = jnp.zeros((1, 1, 32, 16))
        modules.ring_attention(q, k, v, bias, axis_name="sp", mesh=ring(2))
    with pytest.raises(ValueError, match="mesh: given where axis_name 'sp' is already bound"):
        mesh = ring(2)
        jax.shard_map(
            lambda q, k, v: modules.ring_attention(q, k, v, axis_name="sp", mesh=mesh),
            mesh=mesh, in_specs=(SEQ,) * 3, out_specs=SEQ, check_vma=False,
        )(q, k, v)  # fmt: skip
    with pytest.raises(InvalidArgument, match="x: expected axis 1 divisible by 2 \\* axis_size"):
        modules.zigzag_shard(q[:, :31], 2)
    with pytest.raises(ValueError, match="axis_size: given 0"):
        modules.zigzag_shard(q, 0)


def test_supports_needs_no_mesh():
    q, k, v = qkv()
    assert modules.supports("ring_attention", q, k, v, axis_name="sp")
    assert not modules.supports("ring_attention", q, k, v[:1], axis_name="sp")
