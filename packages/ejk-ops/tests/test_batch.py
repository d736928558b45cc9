"""One config for a whole batch."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Kernel,
    pmap_with_config,
    vmap_with_config,
)


@dataclass(frozen=True)
class Config:
    shape: tuple = ()


class Affine(Kernel[Config, jax.Array]):
    def run(self, x, w, *, bias=None, scale=1.0, cfg):
        assert cfg.shape == (3,)
        y = x * w["w"] * scale
        return y if bias is None else y + bias

    def heuristic_cfg(self, inv):
        return Config(inv.args[0].shape)


@pytest.fixture
def executor():
    events = []
    chain = ConfigSelectorChain(
        cache=ConfigCache(), autotune=False, on_event=lambda name, _: events.append(name)
    )
    made = Executor(chain)
    made.events = events
    return made


def data(n):
    x = jnp.arange(3.0 * n).reshape(n, 3)
    return x, {"w": x + 1}, x + 2


def test_vmap_matches_single_calls(executor):
    x, w, bias = data(4)
    run = vmap_with_config(Affine(), executor=executor)
    np.testing.assert_allclose(run(x, w, bias=bias, scale=2.0), 2 * x * (x + 1) + bias)
    assert executor.events.count("heuristics") == 1
    shared = vmap_with_config(Affine(), in_axes=(1, {"w": None}), executor=executor)
    np.testing.assert_allclose(shared(x.T, {"w": x[0]}), x * x[0])
    none = vmap_with_config(Affine(), in_axes=(0, None), executor=executor)
    np.testing.assert_allclose(jax.jit(none)(x, {"w": x[0]}), x * x[0])
    fixed = vmap_with_config(Affine(), executor=executor, cfg=Config((3,)))
    np.testing.assert_allclose(fixed(x, w), x * (x + 1))


def test_vmap_gradient_and_bad_axes(executor):
    x, w, _ = data(4)
    run = vmap_with_config(Affine(), executor=executor)
    np.testing.assert_allclose(jax.grad(lambda x: run(x, w).sum())(x), x + 1)
    with pytest.raises(ValueError, match="one entry per positional"):
        vmap_with_config(Affine(), in_axes=(0,), executor=executor)(x, w)
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        run(x[:3], w)
    with pytest.raises(ValueError, match="no array"):
        vmap_with_config(Affine(), in_axes=None, executor=executor)(x, w)
    with pytest.raises(ValueError, match="axis 2"):
        vmap_with_config(Affine(), in_axes=(2, 0), executor=executor)(x, w)


def test_pmap_matches_single_calls(executor):
    count = jax.local_device_count()
    for n in sorted({count, 1, max(1, count // 2)}):
        x, w, bias = data(n)
        run = pmap_with_config(Affine(), executor=executor)
        out = run(x, w, bias=bias, scale=2.0)
        np.testing.assert_allclose(out, 2 * x * (x + 1) + bias)
        assert len(out.sharding.device_set) == n
        np.testing.assert_allclose(run(x + 1, w), (x + 1) * (x + 1))
    shared = pmap_with_config(Affine(), in_axes=(1, None), executor=executor)
    np.testing.assert_allclose(shared(x.T, {"w": x[0]}), x * x[0])
    with pytest.raises(ValueError, match=f"{count + 1} elements.*{count}"):
        run(*data(count + 1)[:2])


def test_pmap_collectives(executor):
    class Total(Kernel):
        def run(self, x, *, cfg):
            return jax.lax.psum(x, "everyone")

    n = jax.local_device_count()
    x = jnp.arange(2.0 * n).reshape(n, 2)
    out = pmap_with_config(Total(), axis_name="everyone", executor=executor)(x)
    np.testing.assert_allclose(out, np.broadcast_to(x.sum(0), (n, 2)))
