# ruff: noqa: RUF043 (messages are patterns)
"""A call on a mesh equals the call without one: eight CPU devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel.modules as modules
from ejkernel.modules._specs import Argument, Layout, check_divisible, read_specs, spread_key_heads
from ejkernel.ops import InvalidArgument
from ejkernel.types import MaskInfo
from ejktest.calls import call

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def mesh_of(shape, names=("dp", "tp")):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def assert_same(a, b):
    for x, y in zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-5)


def qkv(batch=2, length=8, heads=4, kv_heads=4, dim=8):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, length, heads, dim)] + [(batch, length, kv_heads, dim)] * 2
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


BSHD = P("dp", None, "tp", None)


@pytest.mark.parametrize("shape", [(2, 4), (1, 2)])
def test_three_specs_with_mask_sinks_bias_and_dropout(shape):
    q, k, v = qkv()
    ids = jnp.asarray([[0] * 5 + [1] * 3, [3] * 8])
    bias = jax.random.normal(jax.random.key(5), (1, 4, 8, 8))
    sinks = jnp.linspace(-1.0, 1.0, 4).reshape(4, 1)
    options = dict(
        bias=bias, softmax_aux=sinks, mask_info=MaskInfo.from_segments(ids), causal=True,
        dropout_prob=0.3, dropout_seed=jnp.int32(7), return_lse=True,
    )  # fmt: skip
    mesh = mesh_of(shape)

    def run(q, bias, **where):
        return modules.flash_attention(q, k, v, **{**options, "bias": bias}, **where)

    where = dict(mesh=mesh, in_specs=(BSHD,) * 3)
    expected = run(q, bias)
    with mesh:
        out, lse = run(q, bias, **where, out_specs=BSHD)
    assert_same((out, lse), expected)
    assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, BSHD), 4)

    def gradients(**where):
        loss = lambda q, bias: jnp.sum(jnp.sin(run(q, bias, **where)[0]))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(q, bias)

    if shape == (2, 4):
        assert_same(gradients(**where), gradients())


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_kv_heads_that_do_not_divide_are_picked_per_shard(kv_heads):
    q, k, v = qkv(heads=12, kv_heads=kv_heads)
    where = dict(mesh=mesh_of((2, 4)), in_specs=(BSHD,))
    attend = lambda k, **where: modules.flash_attention(q, k, v, causal=True, **where)  # noqa: E731
    assert_same(attend(k, **where), attend(k))
    if kv_heads == 3:
        gradient = lambda **where: jax.grad(lambda k: jnp.sin(attend(k, **where)).sum())(k)  # noqa: E731
        assert_same(gradient(**where), gradient())


@pytest.mark.parametrize("explicit", [False, True])
def test_other_specs_and_meshes(explicit):
    q, k, v = qkv(batch=4)
    expected = modules.flash_attention(q, k, v)
    if explicit:
        mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
    else:
        mesh = mesh_of((2, 2, 2), ("a", "b", "c"))
    both = P(("a", "b"), None, "c")
    where = dict(mesh=mesh, in_specs=[both, None, None])
    assert_same(modules.flash_attention(q, k, v, **where), expected)
    placed = modules.flash_attention(q, k, v, **where, out_specs=P("a"))
    assert_same(placed, expected)
    assert placed.sharding.spec[:1] == P("a")[:1]
    with jax.set_mesh(mesh):
        assert_same(jax.jit(lambda q: modules.flash_attention(q, k, v, **where))(q), expected)


ROWS = P(None, "tp", None)
SPECS = {
    "attention": [BSHD] * 3,
    "page_attention": [BSHD],
    "ragged_page_attention": [ROWS],
    "ragged_page_attention_v3": [ROWS],
    "ragged_decode_attention": [BSHD],
    "blocksparse_attention": [BSHD] * 3,
    "native_sparse_attention": [BSHD] * 3,
    "recurrent_attention": [BSHD] * 3,
    "gated_delta_rule": [BSHD] * 3,
    "causal_conv1d": [P("dp", None, "tp")],
    "gla_attention": [BSHD] * 3,
    "lightning_attention": [BSHD] * 3,
    "mla_attention": [BSHD],
    "mla_decode": [P("dp", "tp", None)],
    "mean_pooling": [P("dp", None, "tp")],
    "grouped_matmul": [P("dp", None), P(None, None, "tp")],
}


@pytest.mark.parametrize("operation", sorted(SPECS))
def test_every_operation(operation):
    c = call(operation)
    function = getattr(modules, operation)
    where = dict(mesh=mesh_of((2, 2)), in_specs=SPECS[operation])
    assert_same(function(**c.arguments, **where), function(**c.arguments))


@pytest.mark.parametrize("explicit", [False, True])
def test_experts_over_a_mesh(explicit):
    c = call("grouped_matmul")
    rhs = jnp.concatenate([c.arrays["rhs"], c.arrays["rhs"][:1]])
    fixed = {"group_offset": jnp.int32(1), "group_sizes": jnp.asarray([1, 3, 0, 2, 2], jnp.int32)}
    names = "lhs", "rhs", "existing_out"
    arrays = c.arrays["lhs"], rhs, c.arrays["existing_out"]
    specs = P("dp"), P("tp"), P("dp")

    def run(*arrays, **where):
        smooth = dict(zip(names, arrays, strict=True))
        out, pull = jax.vjp(
            lambda smooth: modules.grouped_matmul(**smooth, **fixed, **where), smooth
        )
        return out, pull(jnp.sin(out))

    expected = jax.jit(run)(*arrays)
    if not explicit:
        where = dict(mesh=mesh_of((2, 2)), in_specs=specs[:2])
        assert_same(jax.jit(lambda *a: run(*a, **where))(*arrays), expected)
        return
    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"))):
        placed = [jax.device_put(x, s) for x, s in zip(arrays, specs, strict=True)]
        assert_same(jax.jit(run)(*placed), expected)


def test_attention_dropout_follows_global_indices():
    q, k, v = qkv()
    options = dict(dropout_rng=jax.random.key(3), deterministic=False, dropout_prob=0.5)
    where = dict(mesh=mesh_of((2, 4)), in_specs=(BSHD,) * 3)
    assert_same(
        modules.attention(q, k, v, **options, **where), modules.attention(q, k, v, **options)
    )


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        (dict(mesh=None, in_specs=(BSHD,)), ValueError, "mesh"),
        (dict(mesh="m", in_specs=None), ValueError, "in_specs"),
        (dict(mesh="m", in_specs=()), ValueError, "in_specs: given 0 specs, expected 1 to"),
        (dict(mesh="m", in_specs=(BSHD,) * 16), ValueError, "in_specs: given 16 specs"),
        (dict(mesh="m", in_specs=(None, P(None, "tp"))), ValueError, "kv_len is sharded over"),
        (dict(mesh="m", in_specs=(P(None, None, None, "tp"),)), ValueError, "axis head_dim"),
        (dict(mesh="m", in_specs=(P("xx"),)), ValueError, "'xx' is unknown, the mesh has: dp, tp"),
        (dict(mesh="m", in_specs=(P("dp"), P("tp"))), ValueError, "batch is sharded over"),
        (dict(mesh="m", in_specs=(P("tp", None, "tp"),)), ValueError, "already shards axis batch"),
        (dict(mesh="m", in_specs=(P(None, None, "tp"), P(None, None, "dp"))), ValueError, "heads"),
        (dict(mesh="m", in_specs=(P(*[None] * 5),)), ValueError, "5 entries, but query has 4"),
        (dict(mesh="m", in_specs=("dp",)), InvalidArgument, r"in_specs\[0\]: expected PartitionSp"),
        (dict(mesh="m", in_specs=BSHD), InvalidArgument, "in_specs: expected a sequence"),
        (dict(mesh="m", in_specs={"query": BSHD}), InvalidArgument, "in_specs, out_specs: exp"),
        (dict(mesh="m", in_specs=(BSHD,), out_specs=3), InvalidArgument, "out_specs: expected"),
        (dict(mesh="m", in_specs=(BSHD,), out_specs="dp"), InvalidArgument, "out_specs: expected"),
        (dict(mesh="m", in_specs=(P("tp"),)), InvalidArgument, "batch of size 2.*not divisible"),
        (dict(mesh="m", in_specs=(BSHD,), out_specs=(BSHD,) * 3), ValueError, "out_specs: given 3"),
        (dict(mesh="m", in_specs=(BSHD,), out_specs=P("q")), ValueError, "'q' is unknown"),
        (dict(mesh="m", in_specs=(BSHD,), out_specs=P("dp", "dp")), ValueError, "at most once"),
    ],
)
def test_bad_specs(where, error, message):
    if where["mesh"] == "m":
        where = {**where, "mesh": mesh_of((2, 4))}
    with pytest.raises(error, match=message):
        modules.flash_attention(*qkv(), **where)


def test_bad_meshes():
    specs, arrays = (P("dp"),) * 3, qkv()
    attend = modules.flash_attention
    with pytest.raises(ValueError, match="mesh: expected one with devices"):
        attend(*arrays, mesh=Mesh(np.zeros(0, object), ("dp",)), in_specs=specs)
    for wrong in ({}, jax.devices()):
        with pytest.raises(InvalidArgument, match="mesh: expected jax.sharding.Mesh, given"):
            attend(*arrays, mesh=wrong, in_specs=specs)
    mesh = mesh_of((2, 4))
    with jax.set_mesh(mesh_of((4, 2))), pytest.raises(ValueError, match="mesh: .* in force"):
        attend(*arrays, mesh=mesh, in_specs=specs)
    inner = partial(attend, mesh=mesh, in_specs=specs)
    outer = jax.shard_map(inner, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"mesh: .*get_abstract_mesh\(\)"):
        outer(*arrays)


def test_bad_specs_of_other_operations():
    grouped, sparse = (call(name) for name in ("grouped_matmul", "native_sparse_attention"))
    mesh = mesh_of((2, 4))
    with pytest.raises(ValueError, match="axis seq may not be sharded.*ring_attention"):
        modules.native_sparse_attention(**sparse.arguments, mesh=mesh, in_specs=(P(None, "tp"),))
    with pytest.raises(ValueError, match="axis q_len may not be sharded.*; axis_name is"):
        ring = partial(modules.ring_attention, axis_name="tp", mesh=mesh)
        ring(*qkv(), in_specs=(P(None, "dp"),) * 3)
    with pytest.raises(ValueError, match="axis inner may not be sharded"):
        modules.grouped_matmul(**grouped.arguments, mesh=mesh, in_specs=(P(None, "tp"),))
    with pytest.raises(InvalidArgument, match="2 kv heads cannot be sharded over 4"):
        modules.native_sparse_attention(**sparse.arguments, mesh=mesh, in_specs=(BSHD,))


def test_a_sharded_sequence_with_another_output_dtype_stays_whole():
    spec = P(None, "tp")
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    attend = partial(modules.flash_attention, causal=True, out_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="axis q_len may not be sharded"):
        attend(*qkv(), mesh=mesh, in_specs=(spec,) * 3)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in qkv()]
    out, expected = jax.jit(attend)(*placed), attend(*qkv())
    assert out.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), expected.astype(jnp.float32))


def test_specs_are_pure_functions():
    layout = Layout("f", {"x": 2, "y": 3}, frozenset({"batch", "heads", "kv_heads"}))
    query = Argument("query", ("batch", "q_len", "heads", "head_dim"), (4, 5, 6, 7))
    key = Argument("key", ("batch", "kv_len", "kv_heads", "head_dim"), (4, 5, 3, 7))
    absent = Argument("bias", ("#batch", "#heads", "q_len", "kv_len"), None)
    read_specs(layout, [query, key, absent], [P("x", None, "y"), None, P("x")])
    assert layout.spread == {"batch": ("x",), "heads": ("y",)}
    sizes = {"heads": 6, "kv_heads": 3}
    assert not spread_key_heads(layout, sizes, whole_groups=False)
    assert layout.spread["kv_heads"] == ("y",)
    check_divisible(layout, [query, key, absent])
    assert layout.spec(key.words, key.shape) == P("x", None, "y", None)
    assert layout.spec(("#batch", "#heads", "q_len", "kv_len"), (1, 6, 5, 5)) == P(
        None, "y", None, None
    )


def test_a_spec_for_an_absent_argument_may_be_short():
    q, k, v = qkv()
    specs = (P("dp"),) * 4  # the last one is for the bias, which is not there
    out = modules.flash_attention(q, k, v, mesh=mesh_of((2, 1)), in_specs=specs)
    assert_same(out, modules.flash_attention(q, k, v))
