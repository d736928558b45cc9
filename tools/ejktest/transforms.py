"""Checks that JAX's transformations leave results unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

Arrays = Mapping[str, Any]


def floats(arrays: Arrays) -> dict[str, Any]:
    """Returns the floating arrays, which have gradients."""
    return {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}


@jax.jit
def loss_of(outputs: Any) -> jax.Array:
    """A smooth number that depends on every finite output."""
    leaves = jax.tree.leaves(outputs)
    return jnp.stack([jnp.sum(jnp.sin(jnp.where(jnp.isfinite(x), x, 0.0))) for x in leaves]).sum()


def with_gradients(function: Callable[..., Any], arrays: Arrays) -> Any:
    """``(outputs, gradients by name)`` of ``loss_of(function(**arrays))``."""

    def loss(smooth: Arrays) -> Any:
        outputs = function(**{**arrays, **smooth})
        return loss_of(outputs), outputs

    gradients, outputs = jax.grad(loss, has_aux=True)(floats(arrays))
    return outputs, gradients


def with_pullback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a cotangent and arrays that gives outputs and gradients.

    The cotangent is a tree like the outputs, or a function of each of them.
    """

    def pull_back(cotangent: Any, *arrays: Any) -> Any:
        out, pull = jax.vjp(function, *arrays)
        return out, pull(jax.tree.map(cotangent, out) if callable(cotangent) else cotangent)

    return pull_back


def assert_close(actual: Any, expected: Any) -> None:
    """Asserts that trees have the same arrays, up to the order of additions."""

    def same(x: Any, y: Any) -> None:
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)

    jax.tree.map(same, actual, expected)


def check_transformations(
    function: Callable[..., Any], pairs: Arrays, shared: Collection[str] = ()
) -> None:
    """Two calls under vmap of grad, grad of vmap in a scan, and checkpoint are the calls alone.

    Alone, they repeat bit by bit, and abstract evaluation knows their shapes.

    Args:
        function: takes arrays by name, gives arrays; ``loss_of`` them is differentiated.
        pairs: arguments by name, of both calls and stacked.
        shared: names of arguments that are not stacked and serve both calls.
    """
    mapped = {name: x for name, x in pairs.items() if name not in shared}
    common = {name: pairs[name] for name in shared}
    calls = [{**common, **{name: x[i] for name, x in mapped.items()}} for i in range(2)]
    alone = jax.jit(partial(with_gradients, function))
    results = [alone(call) for call in calls]
    jax.tree.map(np.testing.assert_array_equal, alone(calls[0]), results[0])
    shapes = jax.eval_shape(lambda call: function(**call), calls[0])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (shapes,)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), (results[0][0],)
    )

    stacked = jax.tree.map(lambda *x: np.stack(x), *results)
    axes = ({name: None if name in shared else 0 for name in pairs},)
    checkpointed = jax.checkpoint(lambda **call: function(**call))
    mapped_calls = jax.vmap(partial(with_gradients, checkpointed), axes)
    assert_close(jax.jit(mapped_calls)(dict(pairs)), stacked)

    losses = jax.vmap(lambda call: loss_of(function(**call)), axes)

    def mean_of_scan(smooth: Arrays) -> Any:
        """Both calls in either order, one step each: the same gradients in both steps."""
        arrays = {**pairs, **smooth}
        steps = {name: jnp.stack([arrays[name], arrays[name][::-1]]) for name in mapped}
        others = {name: arrays[name] for name in shared}

        def add(total: Any, step: Arrays) -> Any:
            return total + losses({**others, **step}).sum() / 2, None

        return jax.lax.scan(add, 0.0, steps)[0]

    sums = {name: g.sum(0) if name in shared else g for name, g in stacked[1].items()}
    assert_close(jax.jit(jax.grad(mean_of_scan))(floats(pairs)), sums)


def check_shard_map(
    function: Callable[..., Any],
    arrays: Arrays,
    specs: Mapping[str, PartitionSpec],
    out_specs: Any,
    *,
    devices: int = 1,
    **options: Any,
) -> None:
    """Asserts that ``shard_map`` over axis "x" changes neither values nor gradients.

    Replicated arrays have gradients, too.

    Args:
        function: takes arrays by name.
        specs: of the arrays that are spread.
        options: of ``jax.shard_map``.
    """
    mesh = Mesh(np.array(jax.devices()[: min(devices, jax.device_count())]), ("x",))
    every_spec = {name: specs.get(name, PartitionSpec()) for name in arrays}
    options |= {"mesh": mesh, "in_specs": (every_spec,), "out_specs": out_specs}
    sharded = jax.shard_map(lambda arrays: function(**arrays), **options)
    both = (lambda **arrays: sharded(arrays), function)
    assert_close(*(jax.jit(partial(with_gradients, f))(dict(arrays)) for f in both))
