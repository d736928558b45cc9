"""grouped_matmul against one dense product of the same operations, and jax.lax.ragged_dot."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench.case import Case
from bench.shapes import GROUPED, GroupedShape
from ejkernel.modules import grouped_matmul

BYTES = {"float32": 4, "bfloat16": 2}


def _inputs(shape: GroupedShape) -> tuple:
    a, b = jax.random.split(jax.random.key(0))
    lhs = jax.random.normal(a, (shape.m, shape.k), shape.dtype)
    rhs = jax.random.normal(b, (shape.groups, shape.k, shape.n), shape.dtype)
    share = np.random.default_rng(0).dirichlet(np.full(shape.groups, 4.0))
    if shape.even:
        share = np.full(shape.groups, 1 / shape.groups)
    sizes = np.floor(share * shape.m).astype(np.int32)
    sizes[-1] += shape.m - sizes.sum()
    return lhs, rhs, jnp.asarray(sizes)


def _dense(lhs, rhs, sizes):
    return lhs @ rhs[0]


def _case(shape: GroupedShape, device: str) -> Case:
    contenders = {"ejkernel": grouped_matmul, "dense": _dense, "ragged_dot": jax.lax.ragged_dot}
    width = BYTES[shape.dtype]
    moved = width * (shape.m * (shape.k + shape.n) + shape.groups * shape.k * shape.n)
    return Case(
        shape.name, functools.partial(_inputs, shape), contenders,
        2.0 * shape.m * shape.k * shape.n, float(moved), shape.dtype, (0, 1), 2.0,
        notes=shape.source,
    )  # fmt: skip


def cases(device: str) -> list[Case]:
    kind = "cpu" if device == "cpu" else "gpu"
    return [_case(s, device) for s in GROUPED if s.device == kind]
