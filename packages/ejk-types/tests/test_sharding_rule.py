"""The sharding rule of a call: words, factors for the compiler, layouts, parts of a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.types import calls
from ejkernel.types.calls.layout import Layout, Shard
from ejkernel.types.calls.sharding import ShardingRule
from ejkernel.types.calls.sharding_notes import sharding_notes

MESH = {"dp": 2, "tp": 4}


def rule_of(**sizes):
    return ShardingRule("f", {"batch": 4, "heads": 8, "kv_heads": 4, "q_len": 16, **sizes})


def test_axes_that_may_be_sharded():
    rule = rule_of()
    assert rule.words(("batch", "q_len", "heads", "head_dim"), (4, 16, 8, 32)) == (
        "batch", "", "heads", "",
    )  # fmt: skip
    assert rule.words(("#batch", "#heads", "q_len"), (1, 8, 16)) == ("", "heads", "")
    # entries of each batch row next to each other, and a size that no row divides
    assert rule.words(("batch",), (12,)) == ("batch",)
    assert rule.words(("batch",), (6,)) == ("",)
    (size,) = jax.export.symbolic_shape("n")
    assert rule_of(batch=size).words(("batch",), (size,)) == ("",)


def test_words_of_a_call():
    q, k = jnp.zeros((4, 16, 8, 32)), jnp.zeros((4, 16, 2, 32))
    a = calls.FlashAttention.bind(
        calls.FlashAttention.prepare((q, k, k), {"softmax_aux": jnp.zeros(2)})
    )
    rule = calls.FlashAttention.sharding_rule(a)
    assert rule.kv_heads == 2
    axes = calls.FlashAttention.array_axes(a)
    assert axes["query"] == [("batch", "q_len", "heads", "head_dim")]
    assert axes["softmax_aux"] == [("heads", "sinks")]
    assert calls.FlashAttention.forward_axes(a, 2)[1] == "batch heads q_len"


def test_query_and_key_heads_have_a_factor_in_common_where_the_mesh_divides_them():
    rule = rule_of()
    query = rule.factors(("batch", "", "heads"), (4, 16, 8), MESH)
    assert query == ((("batch", 4),), (), (("kv_heads", 4), ("group", 2)))
    assert rule.factors(("kv_heads",), (4,), MESH) == ((("kv_heads", 4),),)
    assert rule.factors(("heads",), (8,), {"tp": 8}) == ((("heads", 8),),)
    combined = rule_of(combined_kv_heads=8)
    assert combined.factors(("combined_kv_heads",), (8,), MESH) == ((("kv_heads", 4), ("", 2)),)


def spread(rule, *arrays, mesh=MESH):
    return rule.layout(mesh, arrays).spread


def test_layouts_follow_the_first_array():
    rule = rule_of()
    query = ("batch", "", "heads", ""), [("dp",), (), ("tp",), ()]
    assert spread(rule, query) == {"batch": ("dp",), "kv_heads": ("tp",), "heads": ("tp",)}
    # one mesh axis shards one word, and only sizes that it divides
    assert spread(rule, query, (("batch",), [("tp",)]))["batch"] == ("dp",)
    assert spread(rule, (("batch", "heads"), [("tp",), ("tp",)])) == {"batch": ("tp",)}
    assert spread(rule_of(batch=3), (("batch",), [("dp",)])) == {}
    assert spread(rule, (("batch",), [("dp", "tp")])) == {"batch": ("dp",)}
    assert spread(rule, (("kv_heads",), [("tp",)])) == {"heads": ("tp",), "kv_heads": ("tp",)}


def test_key_heads_are_sharded_as_far_as_they_divide():
    two = rule_of(kv_heads=2)
    heads = ("heads",), [("dp", "tp")]
    assert spread(two, heads) == {"heads": ("dp", "tp"), "kv_heads": ("dp",)}
    assert spread(rule_of(kv_heads=1), heads) == {"heads": ("dp", "tp")}
    packed = ShardingRule("f", two.sizes, whole_groups=True)
    assert spread(packed, heads) == {"heads": ("dp",), "kv_heads": ("dp",)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [(8, 2, [1]), (8, 4, [2, 3]), (12, 3, [1, 1, 2, 2, 2, 2])],
)
def test_a_shard_picks_the_key_heads_of_its_query_heads(heads, kv_heads, expected, monkeypatch):
    """The second of two devices that share all keys."""
    layout = Layout("f", {"tp": 2}, frozenset(), {"heads": ("tp",)})
    shard = Shard(layout, {"heads": heads, "kv_heads": kv_heads})
    monkeypatch.setattr("jax.lax.axis_index", lambda _: jnp.int32(1))
    a = {"key": jnp.arange(kv_heads)[None]}
    shard.pick_key_heads(a, {"key": ("batch", "kv_heads")})
    np.testing.assert_array_equal(a["key"][0], expected)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
def test_notes_name_the_collectives_of_a_call():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def array(*shape, spec=()):
        place = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    axes = {
        "query": [("batch", "q_len", "heads", "head_dim")],
        "key": [("batch", "kv_len", "kv_heads", "head_dim")],
        "value": [("batch", "kv_len", "kv_heads", "v_dim")],
        "bias": [("#batch", "#heads")],
    }
    arrays = {
        "query": array(4, 16, 8, 32, spec=("dp", None, "tp")),
        "key": array(4, 16, 4, 32, spec=("dp", "tp")),
        "value": array(4, 16, 4, 32, spec=("dp", None, None, "tp")),
        "bias": array(1, 8, spec=(None, "tp")),
    }
    assert sharding_notes(rule_of(), axes, arrays) == (
        "sharded: batch over dp, heads over tp, kv_heads over tp",
        "all-to-all of key, 2 KiB on each device: kv_len stays whole",
        "all-to-all of value, 2 KiB on each device: v_dim stays whole",
        "backward: all-reduce of the gradient of bias, 4 bytes, over dp",
        "better layout, saves 4 KiB on each device: key, value with batch over dp and kv_heads "
        "over tp",
    )
    notes = sharding_notes(rule_of(kv_heads=2), axes, {**arrays, "key": array(4, 16, 2, 32)})
    assert "backward: all-reduce of the gradient of key, 4 KiB, over tp" in notes
    two = array(4, 16, 2, 32, spec=(None, "tp"))
    notes = sharding_notes(rule_of(kv_heads=2), axes, {**arrays, "key": two})
    assert "all-gather of key, 4 KiB on each device: kv_len stays whole" in notes
    assert sharding_notes(rule_of(), axes, {"query": array(4, 16, 8, 32)}) == ()
    only_heads = {"query": array(4, 16, 8, 32, spec=(None, None, "tp"))}
    assert sharding_notes(rule_of(), axes, only_heads) == (
        "sharded: heads over tp, kv_heads over tp",
        "not sharded over dp: devices along it compute the same",
        "better layout, shares out the work: query with batch over dp and heads over tp",
    )
    experts = ShardingRule("f", {"rows": 64, "inner": 8, "groups": 4, "columns": 16})
    words = {"lhs": [("rows", "inner")], "rhs": [("groups", "inner", "columns")]}
    arrays = {"lhs": array(64, 8, spec=("dp",)), "rhs": array(4, 8, 16, spec=("tp",))}
    assert sharding_notes(experts, words, arrays, ("rows", "columns")) == (
        "sharded: rows over dp, groups over tp",
        "all-reduce of the output, 1 KiB, over tp: devices have terms of it",
        "backward: all-reduce of the gradient of lhs, 512 bytes, over tp",
        "backward: all-reduce of the gradient of rhs, 256 bytes, over dp",
    )
