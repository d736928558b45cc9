"""Regions of a program that each device runs on its part."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.ops.partition import may_be_sharded, run_region
from ejkernel.ops.region import mesh_axes_of

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
P = PartitionSpec


@dataclass(frozen=True)
class Layout:
    spread: Any
    summed_axes: frozenset[str] = frozenset()

    @property
    def layout(self):
        """A device's shard, as functions of regions see it, is the layout."""
        return self

    def axes(self, word):
        return self.spread.get(word, ())

    def spec(self, words, shape):
        return P(*(self.axes(word) or None for word in words))


@dataclass(frozen=True)
class Rule:
    """Every word may be sharded; results are summed over the mesh axes of "terms"."""

    sizes: Any

    def factors(self, words, shape, mesh_sizes):
        return tuple(((w, n),) if w else () for w, n in zip(words, shape, strict=True))

    def layout(self, mesh_sizes, arrays):
        spread = {}
        for words, axes in arrays:
            for word, names in zip(words, axes, strict=True):
                if word and names:
                    spread.setdefault(word, names)
        return Layout(spread, frozenset(spread.get("terms", ())))

    def shard(self, layout):
        return layout


def weighted(x, w):
    """``x * w`` and ``w . x`` of rows ``x [a, b]``; sizes that a device sees are added."""

    def multiply(shard, x, w):
        return x * w, x @ w + x.shape[0]

    words = [("rows", ""), ("",)], lambda _: [("rows", ""), ("rows",)]
    return run_region(multiply, (x, w), *words, Rule({"rows": 8}))


def summed(x):
    return run_region(
        lambda _, x: (jnp.sum(x, 0),), (x,), [("rows", "")], lambda _: [("",)],
        Rule({"rows": 8}), summed=True,
    )[0]  # fmt: skip


X, W = np.arange(24.0, dtype=np.float32).reshape(8, 3), np.arange(3, dtype=np.float32)
MESH = jax.make_mesh(
    (4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8]
)


def placed(x, *spec):
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def test_every_device_computes_its_rows():
    compiled = jax.jit(weighted).lower(placed(X, "a"), placed(W)).compile()
    scaled, dots = compiled(placed(X, "a"), placed(W))
    np.testing.assert_array_equal(scaled, X * W)
    np.testing.assert_array_equal(dots, X @ W + 2)  # of 8 rows on 4 devices
    assert dots.sharding.spec == P("a")
    assert "all-gather" not in compiled.as_text()
    alone = jax.jit(weighted)(X, W)[1]
    np.testing.assert_array_equal(alone, X @ W + 8)


def test_results_without_a_sharded_axis_are_summed():
    np.testing.assert_array_equal(jax.jit(summed)(placed(X, ("a", "b"))), X.sum(0))


def test_mapped_regions():
    rows = np.stack([X, X + 1])
    found = jax.jit(jax.vmap(weighted, in_axes=(0, None)))(placed(rows, "b", "a"), placed(W))
    np.testing.assert_array_equal(found[0], rows * W)
    assert found[0].sharding.spec == P("b", "a")


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))


def test_second_gradients_of_a_custom_vjp():
    def cubes(x):
        words = [("rows", "")]
        return run_region(lambda _, x: (cube(x),), (x,), words, lambda _: words, Rule({"rows": 8}))

    def gradient(function):
        return lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(function(x)[0])))(x)

    expected = gradient(lambda x: [gradient(lambda x: [x**3])(x)])(W)
    x = placed(np.tile(W, (8, 1)), "a")
    second = jax.jit(gradient(lambda x: [gradient(cubes)(x)]))(x)
    np.testing.assert_allclose(second, np.tile(expected, (8, 1)), rtol=1e-5)


def test_gradients_of_a_sum_over_devices():
    """Each device has a term of every result, whose cotangent belongs to all of them."""

    def product(x, w):
        rule = Rule({"rows": 8, "terms": 4})
        words = [("rows", "terms"), ("terms",)]
        return run_region(lambda _, x, w: (x @ w,), (x, w), words, lambda _: [("rows",)], rule)[0]

    def gradients(function):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), (0, 1)))

    x, w = X.reshape(8, 3)[:, [0, 1, 2, 0]], np.arange(4, dtype=np.float32)
    found = gradients(product)(placed(x, "b", "a"), placed(w, "a"))
    for array, expected in zip(found, gradients(jnp.matmul)(x, w), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)


def test_exported_programs_have_no_region():
    exported = jax.export.export(jax.jit(weighted))(placed(X, "a"), placed(W))
    np.testing.assert_array_equal(jax.jit(exported.call)(placed(X, "a"), placed(W))[0], X * W)


def test_a_program_is_not_found_for_another_function(tmp_path):
    """JAX's cache on disk tells regions apart that differ in their function alone."""

    def texts(factor):
        def scale(x):
            multiply = lambda _, x: (x * factor,)  # noqa: E731
            return run_region(multiply, (x,), [("rows", "")], lambda _: [("rows", "")], Rule({}))[0]

        return jax.jit(scale).lower(placed(X, "a")).as_text()

    name = "jax_remove_custom_partitioning_ptr_from_cache_key"
    before = getattr(jax.config, name)
    try:
        for setting in (False, True):
            jax.config.update(name, setting)
            names = [_region_name(texts(factor)) for factor in (2.0, 3.0, 2.0)]
            assert names[0] != names[1]
            assert (names[0] == names[2]) == setting
    finally:
        jax.config.update(name, before)


def _region_name(text):
    return text.split("ejkernel_region_", 1)[1].split("(", 1)[0]


def test_types_say_whether_arrays_may_be_sharded():
    found = []

    def look(*arrays):
        found.append(may_be_sharded(arrays))
        return arrays[0]

    jax.jit(look)(X)
    jax.jit(look)(placed(X, "a"), W)
    jax.jit(lambda x: look(x @ jnp.ones(3)))(placed(X, "a"))
    jax.jit(jax.shard_map(look, mesh=MESH, in_specs=P("a"), out_specs=P("a")))(placed(X, "a"))
    over_b = partial(jax.shard_map, mesh=MESH, in_specs=P("a"), out_specs=P("a"))
    jax.jit(over_b(look, axis_names={"a"}))(placed(X, "a"))
    assert found == [False, True, True, False, True]
    assert not may_be_sharded((placed(X, "a"),))  # outside of a trace


def test_how_the_compiler_says_that_an_axis_is_split():
    sizes = {"a": 4, "b": 2}
    devices = np.arange(8).reshape(4, 2)
    assert mesh_axes_of(sizes, devices.reshape(4, 1, 2)) == [("a",), ()]
    assert mesh_axes_of(sizes, devices.T.reshape(2, 4, 1)) == [("b",), ("a",)]
    assert mesh_axes_of(sizes, devices.reshape(8, 1)) == [("a", "b")]
    assert mesh_axes_of(sizes, devices.T.reshape(8, 1)) == [("b", "a")]
    # half of a mesh axis for each of two axes
    assert mesh_axes_of(sizes, devices.reshape(2, 2, 2)) == [(), ()]
