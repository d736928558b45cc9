"""Calls of the operations that are no attention: grouped products and means."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.workloads.call import WIDTH
from ejkernel.modules.workloads.families import GroupedShape, PoolShape


def group_sizes(shape: GroupedShape) -> np.ndarray:
    """Rows per group: even, of a Zipf distribution, or as uneven as a router's choice."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(shape.groups, 4.0))
    if shape.even:
        share = np.full(shape.groups, 1 / shape.groups)
    if shape.zipf:
        share = rng.permutation(1 / np.arange(1, shape.groups + 1))
        share /= share.sum()
    sizes = np.floor(share * shape.m).astype(np.int32)
    sizes[-1] += shape.m - sizes.sum()
    return sizes


def _operands(shape: GroupedShape) -> dict[str, Any]:
    a, b = jax.random.split(jax.random.key(0))
    rhs = jax.random.normal(b, (shape.groups, shape.k, shape.n), shape.dtype)
    given = {
        "lhs": jax.random.normal(a, (shape.m, shape.k), shape.dtype),
        "rhs": rhs,
        "group_sizes": jnp.asarray(group_sizes(shape)),
    }
    if shape.stored is not None:
        given["rhs"] = (rhs * 16).astype(shape.stored)
        given["rhs_scale"] = jnp.full((shape.groups, shape.n), 1 / 16, jnp.float32)
    return given


def product(shape: GroupedShape, _: str) -> dict[str, Any]:
    """The fields of a Call."""
    used = int((group_sizes(shape) > 0).sum())
    matrices = used * shape.k * shape.n * WIDTH[shape.stored or shape.dtype]
    return {
        "make": functools.partial(_operands, shape),
        "options": {},
        "flops": 2.0 * shape.m * shape.k * shape.n,
        "moved": float(WIDTH[shape.dtype] * shape.m * (shape.k + shape.n) + matrices),
        "dtype": shape.dtype,
        "gradients": () if shape.stored else ("lhs", "rhs"),
        "backward_factor": 2.0,
    }


def _rows(shape: PoolShape) -> dict[str, Any]:
    size = (shape.batch, shape.length, shape.channels)
    return {"x": jax.random.normal(jax.random.key(0), size, shape.dtype)}


def means(shape: PoolShape, _: str) -> dict[str, Any]:
    """The fields of a Call."""
    numbers = float(shape.batch * shape.length * shape.channels)
    return {
        "make": functools.partial(_rows, shape),
        "options": {} if shape.chunk is None else {"chunk_size": shape.chunk},
        "flops": numbers,
        "moved": numbers * WIDTH[shape.dtype],
        "dtype": shape.dtype,
        "gradients": ("x",),
        "backward_factor": 1.0,
    }
