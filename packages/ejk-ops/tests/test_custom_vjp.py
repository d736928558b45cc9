"""Rules of ``Kernel.custom_vjp``."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Executor, Kernel


@dataclass(frozen=True)
class Config:
    factor: float = 1.0


class Product(Kernel[Config, jax.Array]):
    """``a * b``, whose gradients are scaled by the config, so that they tell who made them."""

    result = None

    def run(self, a, b, *, cfg, bias=None, flag=True):
        return a * b if bias is None else a * b + bias

    def heuristic_cfg(self, inv):
        return Config()

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        if self.result is not None:
            return self.result(primals, cfg, kwargs, cotangents)
        a, b = primals
        (ct,) = cotangents
        return ct * b * cfg.factor, ct * a * cfg.factor


def returning(result):
    kernel = Product()
    kernel.result = result
    return kernel


@pytest.fixture
def a():
    return jnp.arange(1.0, 4.0)


@pytest.fixture
def b():
    return jnp.arange(4.0, 7.0)


run = Executor()


def grads(kernel, a, b, argnums=(0, 1), **kwargs):
    return jax.grad(lambda a, b: run(kernel, a, b, **kwargs).sum(), argnums)(a, b)


def test_the_forward_config_is_used_backward(a, b):
    ga, gb = grads(Product(), a, b, cfg=Config(5.0))
    np.testing.assert_allclose(ga, 5 * b)
    np.testing.assert_allclose(gb, 5 * a)
    ga, _ = grads(Product(), a, b)
    np.testing.assert_allclose(ga, b)


def test_none_is_zero_and_dtype_is_the_primal_one(a, b):
    kernel = returning(lambda p, cfg, k, ct: (None, (ct[0] * p[0]).astype(jnp.float32)))
    ga, gb = grads(kernel, a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))
    assert ga.dtype == gb.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(ga, np.float32), 0)
    np.testing.assert_allclose(np.asarray(gb, np.float32), a)


def test_wrong_count_shape_or_kind(a, b):
    cases = [
        (lambda p, cfg, k, ct: (ct[0],), "index 1 is missing"),
        (lambda p, cfg, k, ct: (ct[0],) * 3, "index 2 is too many"),
        (lambda p, cfg, k, ct: (ct[0], ct[0][:2]), r"index 1: .*\(2,\).*\(3,\)"),
        (lambda p, cfg, k, ct: (ct[0], (ct[0], ct[0])), "index 1"),
        (lambda p, cfg, k, ct: ct[0], "tuple"),
        (lambda p, cfg, k, ct: ((ct[0], ct[0]), {"nope": ct[0]}), "'nope'"),
    ]
    for result, message in cases:
        with pytest.raises(TypeError, match=message):
            grads(returning(result), a, b)


def test_keyword_arguments(a, b):
    loss = lambda bias, kernel: run(kernel, a, b, bias=bias).sum()  # noqa: E731
    with pytest.raises(TypeError, match="keyword argument 'bias'"):
        jax.grad(loss)(a, Product())
    # not differentiated: no gradient is needed, under jit neither
    np.testing.assert_allclose(grads(Product(), a, b, bias=a)[0], b)
    np.testing.assert_allclose(
        jax.grad(jax.jit(lambda x, bias: run(Product(), x, b, bias=bias).sum()))(a, b), b
    )
    named = returning(lambda p, cfg, k, ct: ((None, None), {"bias": 3 * ct[0]}))
    np.testing.assert_allclose(jax.grad(loss)(a, named), 3 * np.ones(3))


def test_static_and_integer_positional_arguments(a):
    class Mixed(Kernel):
        def run(self, x, flag, count, index, *, cfg):
            return x[index] * count if flag else x[index]

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            x, flag, count, index = primals
            assert flag is True and count == 2
            return jnp.zeros_like(x).at[index].add(count * cotangents[0]), None, None, None

    index = jnp.array([0, 2])
    got = jax.grad(lambda x: run(Mixed(), x, True, 2, index).sum())(a)
    np.testing.assert_allclose(got, [2, 0, 2])
    x_and_index = jax.grad(
        lambda x, i: run(Mixed(), x, True, 2, i).sum(), argnums=(0, 1), allow_int=True
    )(a, index)
    assert x_and_index[1].dtype == jax.dtypes.float0


def test_pytree_arguments_and_several_outputs(a, b):
    class Tree(Kernel):
        def run(self, params, x, *, cfg):
            return {"y": params["w"] * x + params["c"], "n": jnp.int32(3)}

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            params, x = primals
            n, y = cotangents  # leaves in flattening order
            assert n.dtype == jax.dtypes.float0
            return {"w": y * x, "c": None}, y * params["w"]

    params = {"w": a, "c": b}
    gp, gx = jax.grad(lambda p, x: run(Tree(), p, x)["y"].sum(), (0, 1))(params, b)
    np.testing.assert_allclose(gp["w"], b)
    np.testing.assert_allclose(gp["c"], 0)
    np.testing.assert_allclose(gx, a)


def test_under_transformations(a, b):
    loss = lambda a, b: run(Product(), a, b, cfg=Config(2.0)).sum()  # noqa: E731
    grad = jax.grad(loss, (0, 1))
    np.testing.assert_allclose(jax.jit(grad)(a, b)[0], 2 * b)
    batched = jax.vmap(grad)(jnp.stack([a, b]), jnp.stack([b, a]))
    np.testing.assert_allclose(batched[0], 2 * jnp.stack([b, a]))
    shared = jax.vmap(grad, in_axes=(0, None))(jnp.stack([a, b]), b)
    np.testing.assert_allclose(shared[1], 2 * jnp.stack([a, b]))
    np.testing.assert_allclose(jax.grad(jax.checkpoint(loss))(a, b), 2 * b)
    scanned = lambda a: jax.lax.scan(lambda c, _: (run(Product(), c, b), None), a, length=2)[0]  # noqa: E731
    np.testing.assert_allclose(jax.grad(lambda a: scanned(a).sum())(a), b * b)
    outer = jax.grad(lambda a: jax.vmap(lambda a: run(Product(), a, b))(a[None]).sum())(a)
    np.testing.assert_allclose(outer, b)
    numpy_primal = jax.grad(lambda a: run(Product(), a, np.asarray(b)).sum())(a)
    np.testing.assert_allclose(numpy_primal, b)
