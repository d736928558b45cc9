"""Calls of grouped matmul and mean pooling."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.modules.workloads.call import WIDTH
from ejkernel.modules.workloads.families import GroupedShape, PoolShape
from ejkernel.modules.workloads.paged import normals


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
    operands = normals(shape.dtype, lhs=(shape.m, shape.k), rhs=(shape.groups, shape.k, shape.n))
    operands["group_sizes"] = jnp.asarray(group_sizes(shape))
    if shape.stored is not None:
        operands["rhs"] = (operands["rhs"] * 16).astype(shape.stored)
        operands["rhs_scale"] = jnp.full((shape.groups, shape.n), 1 / 16, jnp.float32)
    return operands


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


def means(shape: PoolShape, _: str) -> dict[str, Any]:
    """The fields of a Call."""
    size = (shape.batch, shape.length, shape.channels)
    numbers = float(math.prod(size))
    return {
        "make": functools.partial(normals, shape.dtype, x=size),
        "options": {} if shape.chunk is None else {"chunk_size": shape.chunk},
        "flops": numbers,
        "moved": numbers * WIDTH[shape.dtype],
        "dtype": shape.dtype,
        "gradients": ("x",),
        "backward_factor": 1.0,
    }
