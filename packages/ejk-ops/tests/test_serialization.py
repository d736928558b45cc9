import json
import math
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.ops import FwdParams, abstractify, from_json, short_hash, stable_json, to_json


class Order(Enum):
    ROW = "row"
    COLUMN = "column"


class Pair(NamedTuple):
    a: int
    b: str


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = (1, 2)
    order: Order = Order.ROW


@dataclass(frozen=True)
class MyConfig:
    block_size: int = 128
    algorithm: str = "default"
    inner: Inner = Inner()
    maybe: Inner | None = None
    dtype: np.dtype = field(default_factory=lambda: np.dtype("float32"))
    scale: float = 1.0
    grid: tuple[int, str] = (1, "x")
    mode: Literal["a", "b"] = "a"
    pair: Pair = field(default_factory=lambda: Pair(1, "b"))
    table: dict[str, tuple[int, ...]] = field(default_factory=dict)
    number: int | tuple[int, ...] = 3
    anything: Any = (1, (2, 3))
    flag: bool = True


def test_round_trip_of_nested_fields():
    config = MyConfig(
        block_size=64,
        inner=Inner((4, 5, 6), Order.COLUMN),
        maybe=Inner(),
        dtype=jnp.dtype("bfloat16"),
        table={"x": (1, 2)},
        number=(7, 8),
        anything=(4, (5,)),
        flag=False,
    )
    assert from_json(to_json(config), MyConfig) == config
    assert from_json(to_json(MyConfig()), MyConfig) == MyConfig()


class Shape(Enum):
    WIDE = (16, 64)


def test_loose_hints_round_trip():
    @dataclass(frozen=True)
    class Loose:
        tile: int = None
        inner: Inner = None
        grid: Sequence[int] = (1, 2)
        pairs: Collection[tuple[int, int]] = ((1, 2),)
        shape: Shape = Shape.WIDE

    for config in Loose(), Loose(16, Inner(), (3,), ((4, 5), (6, 7))):
        assert from_json(to_json(config), Loose) == config
    with pytest.raises(ValueError, match=r"Inner\.order=None"):
        from_json('{"order": null}', Inner)
    with pytest.raises(ValueError, match="nested"):
        from_json("[" * 100_000, Loose)


def test_dtypes_come_back_whatever_their_hint():
    @dataclass(frozen=True)
    class Local:
        anything: Any = jnp.bfloat16
        thing: type = jnp.float32
        like: jax.typing.DTypeLike = jnp.bfloat16
        maybe: jax.typing.DTypeLike | None = None
        numpy: object = np.float16
        kept: np.dtype = field(default_factory=lambda: jnp.dtype("float8_e4m3fn"))

    config = Local(maybe=jnp.bfloat16)
    assert from_json(to_json(config), Local) == config
    assert from_json(to_json(Local()), Local) == Local()
    assert from_json('{"anything": "auto"}', Local).anything == "auto"


def test_locally_defined_class():
    @dataclass(frozen=True)
    class Local:
        tiles: tuple[int, int] = (1, 2)
        order: Order = Order.ROW
        params: FwdParams | None = None

    config = Local((3, 4), Order.COLUMN, FwdParams(q_blocksize=64))
    assert from_json(to_json(config), Local) == config


@given(
    st.builds(
        MyConfig,
        block_size=st.integers(),
        algorithm=st.text(),
        inner=st.builds(Inner, st.lists(st.integers()).map(tuple), st.sampled_from(Order)),
        scale=st.floats(allow_nan=False),
        maybe=st.none() | st.just(Inner()),
    )
)
def test_round_trip_property(config):
    assert from_json(to_json(config), MyConfig) == config


def test_missing_fields_take_defaults_and_unknown_ones_are_errors():
    assert from_json("{}", MyConfig) == MyConfig()
    assert from_json('{"inner": {"sizes": [9]}}', MyConfig).inner == Inner((9,))
    with pytest.raises(ValueError, match="MyConfig has no field blocksize"):
        from_json('{"blocksize": 1}', MyConfig)
    with pytest.raises(ValueError, match="inner has no field size"):
        from_json('{"inner": {"size": 1}}', MyConfig)


@pytest.mark.parametrize(
    "text",
    [
        '{"block_size": "128"}',
        '{"block_size": true}',
        '{"flag": 1}',
        '{"inner": {"order": "diagonal"}}',
        '{"inner": 3}',
        '{"dtype": "float33"}',
        '{"grid": [1]}',
        '{"mode": "c"}',
        '{"algorithm": null}',
        "{",
        "[]",
    ],
)
def test_values_that_do_not_fit(text):
    with pytest.raises(ValueError):
        from_json(text, MyConfig)


def test_a_field_without_default_is_required():
    @dataclass(frozen=True)
    class Strict:
        a: int

    with pytest.raises(ValueError, match="needs the field a"):
        from_json("{}", Strict)


def test_stable_json_is_sorted_dense_and_type_blind():
    assert stable_json({"b": 1, "a": (1, None, True)}) == '{"a":[1,null,true],"b":1}'
    assert stable_json({"x": {3, 1, 2}}) == '{"x":[1,2,3]}'
    assert stable_json([jnp.float32, np.dtype("int8"), jnp.bfloat16, np.float32(0.5)]) == (
        '["float32","int8","bfloat16",0.5]'
    )
    assert stable_json(Order.ROW) == '"row"'
    assert stable_json(MyConfig()) == stable_json(json.loads(to_json(MyConfig())))


def test_what_has_no_json_form():
    for bad in (object(), {1: 2}, jnp.ones(3), b"x", lambda: 0):
        with pytest.raises(TypeError):
            stable_json(bad)


def test_short_hash():
    assert short_hash({"a": 1, "b": 2}) == short_hash({"b": 2, "a": 1}) != short_hash({"a": 1})
    assert len(short_hash("x")) == 16 and len(short_hash("x", 6)) == 6
    assert set(short_hash(MyConfig(), 64)) <= set("0123456789abcdef")


def test_hash_is_the_same_in_another_process():
    code = (
        "from ejkernel.ops import short_hash\n"
        "print(short_hash({'s': {'b', 'a', 'c'}, 't': ('x', 1.5, None)}))"
    )
    here = short_hash({"s": {"c", "b", "a"}, "t": ("x", 1.5, None)})
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == here


def test_infinities_survive():
    assert from_json(to_json(MyConfig(scale=math.inf)), MyConfig).scale == math.inf


def test_abstractify_keeps_shapes_dtypes_and_shardings():
    mesh = jax.make_mesh((1,), ("x",))
    sharded = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, PartitionSpec("x")))
    tree = {
        "jax": jnp.ones((2, 3), jnp.bfloat16),
        "numpy": np.ones(4, np.int32),
        "sharded": sharded,
        "static": (1, "a", None, 2.5),
        "already": jax.ShapeDtypeStruct((5,), jnp.float32),
        "key": jax.random.key(0),
    }
    found = abstractify(tree)
    assert found["jax"] == jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert found["numpy"] == jax.ShapeDtypeStruct((4,), jnp.int32)
    assert found["sharded"].sharding == sharded.sharding
    assert found["static"] == (1, "a", None, 2.5)
    assert found["already"] is tree["already"]
    assert found["key"].shape == () and found["key"].dtype == tree["key"].dtype


def test_abstractify_in_a_trace():
    seen = []

    def f(x):
        seen.append(abstractify((x, 3)))
        return x

    jax.make_jaxpr(f)(jnp.ones((2, 3)))
    assert seen[0][0].shape == (2, 3) and seen[0][1] == 3
    assert jax.eval_shape(lambda x: x * 2, seen[0][0]).shape == (2, 3)
