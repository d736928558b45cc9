"""The programs in docs/examples do what they say."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[4] / "docs" / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def moe():
    return load("moe")


@pytest.fixture(scope="module")
def small(moe):
    return moe.init(jax.random.key(0), 8, 16, 8), jax.random.normal(jax.random.key(1), (40, 8))


def test_experts_equal_the_dense_form(moe, small):
    p, x = small
    out, balance = jax.jit(moe.layer)(p, x)
    np.testing.assert_allclose(out, moe.dense(p, x), atol=2e-6)
    assert balance >= 0.99

    def total(f):
        return jax.grad(lambda p, x: jnp.sum(jnp.sin(f(p, x))), (0, 1))

    ours = jax.jit(total(lambda p, x: moe.layer(p, x)[0]))(p, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(total(moe.dense)(p, x)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_experts_spread_over_eight_devices(moe, small):
    p, x = small
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("expert",))
    out = jax.jit(lambda p, x: moe.experts_on_devices(p, x, mesh, "expert"))(p, x)
    np.testing.assert_allclose(out, moe.dense(p, x), atol=2e-6)


def test_experts_learn(moe, capsys):
    losses = moe.main(steps=80, tokens=128)
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:10])
    assert "balance" in capsys.readouterr().out
