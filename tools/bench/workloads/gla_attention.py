"""Chunked gated linear attention against the step-by-step recurrence."""

from __future__ import annotations

import functools

import jax

from bench.case import Case
from bench.shapes import LINEAR, LinearShape
from ejkernel.modules import gla_attention

BYTES = {"float32": 4, "bfloat16": 2}


def _inputs(shape: LinearShape) -> tuple:
    keys = jax.random.split(jax.random.key(0), 4)
    size = (shape.batch, shape.length, shape.heads, shape.head_dim)
    q, k, v = (jax.random.normal(x, size, shape.dtype) for x in keys[:3])
    g = -jax.nn.softplus(jax.random.normal(keys[3], size)) / 16
    return q, k, v, g.astype(shape.dtype)


def _step_by_step(q, k, v, g):
    """The definition, one token after the other."""
    scale = q.shape[-1] ** -0.5

    def step(state, x):
        q, k, v, g = x
        state = state * jax.numpy.exp(g)[..., None] + k[..., None] * v[..., None, :]
        return state, scale * jax.numpy.einsum("bhd,bhde->bhe", q, state)

    first = jax.numpy.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
    xs = jax.tree.map(lambda a: jax.numpy.moveaxis(a, 1, 0), (q, k, v, g))
    return jax.numpy.moveaxis(jax.lax.scan(step, first, xs)[1], 0, 1)


def _case(shape: LinearShape, device: str) -> Case:
    rows = shape.batch * shape.length * shape.heads
    contenders: dict = {"ejkernel": gla_attention}
    contenders["recurrence"] = _step_by_step if shape.length <= 8192 else "too long to step through"
    return Case(
        shape.name, functools.partial(_inputs, shape), contenders,
        4.0 * rows * shape.head_dim**2, 5.0 * rows * shape.head_dim * BYTES[shape.dtype],
        shape.dtype, (0, 1, 2, 3), notes=shape.source,
    )  # fmt: skip


def cases(device: str) -> list[Case]:
    kind = "cpu" if device == "cpu" else "gpu"
    return [_case(s, device) for s in LINEAR if s.device == kind]
