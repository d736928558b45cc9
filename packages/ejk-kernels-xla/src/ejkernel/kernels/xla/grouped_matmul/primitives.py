"""The two grouped matmuls as bilinear JAX primitives.

A loop whose length is data has no transpose of its own, but each matmul is linear in both
operands, and their transposes are the same two matmuls again: derivatives of every order, forward
and reverse, follow. ``vmap`` runs the matmuls one after the other, so that a batch costs what its
rows cost.

All operands and results of the primitives have rank 3 (rows ``[1, m, c]``, matrices
``[g, k, n]``), which lets a result take everything but its shape and dtype from the type of an
operand.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ejkernel.kernels.xla.grouped_matmul.row_loops import Plan, groups_matmul, rows_matmul
from ejkernel.ops.execution.program_cache import bounded_jit
from ejkernel.ops.sequential_vmap import sequential_vmap
from ejkernel.ops.varying import vary_alike

rows_p = Primitive("grouped_rows_matmul")
groups_p = Primitive("grouped_groups_matmul")


def _bind(primitive: Primitive, operands, plan: Plan) -> jax.Array:
    """The primitive on operands that vary over the same mesh axes."""
    return primitive.bind(*vary_alike(operands), plan=plan)


def grouped_rows_matmul(
    lhs: jax.Array, rhs: jax.Array, starts: jax.Array, ends: jax.Array, plan: Plan
) -> jax.Array:
    """``rows_matmul`` of ``lhs`` [m, k] and ``rhs`` [g, k, n], differentiable."""
    return _bind(rows_p, (lhs[None], rhs, starts, ends), plan)[0]


def _rows(lhs, rhs, starts, ends, *, plan: Plan):
    return rows_matmul(lhs[0], rhs, starts, ends, plan=plan)[None]


def _groups(lhs, rhs, starts, ends, *, plan: Plan):
    return groups_matmul(lhs[0], rhs[0], starts, ends, plan=plan)


def _rows_shape(lhs, rhs, starts, plan: Plan):
    return 1, lhs.shape[1], rhs.shape[1 if plan.transposed else 2]


def _groups_shape(lhs, rhs, starts, plan: Plan):
    sizes = (lhs.shape[2], rhs.shape[2])
    return starts.shape[0], *(sizes[::-1] if plan.transposed else sizes)


def _rows_transpose(ct, lhs, rhs, starts, ends, *, plan: Plan):
    if ad.is_undefined_primal(lhs):
        dlhs = _bind(rows_p, (ct, rhs, starts, ends), plan.flipped())
        return dlhs.astype(lhs.aval.dtype), None, None, None
    drhs = _bind(groups_p, (lhs, ct, starts, ends), plan)
    return None, drhs.astype(rhs.aval.dtype), None, None


def _groups_transpose(ct, lhs, rhs, starts, ends, *, plan: Plan):
    if ad.is_undefined_primal(lhs):
        dlhs = _bind(rows_p, (rhs, ct, starts, ends), plan.flipped())
        return dlhs.astype(lhs.aval.dtype), None, None, None
    drhs = _bind(rows_p, (lhs, ct, starts, ends), plan)
    return None, drhs.astype(rhs.aval.dtype), None, None


def _define(primitive: Primitive, function: Callable, shape: Callable, transpose: Callable) -> None:
    def aval(lhs, rhs, starts, ends, *, plan):
        return lhs.update(shape=shape(lhs, rhs, starts, plan), dtype=plan.dtype, weak_type=False)

    def tangent(primals, tangents, *, plan):
        lhs, rhs, *bounds = primals
        dlhs, drhs = (None if isinstance(t, ad.Zero) else t for t in tangents[:2])
        out = primitive.bind(*primals, plan=plan)
        dout = [] if dlhs is None else [_bind(primitive, (dlhs, rhs, *bounds), plan)]
        dout += [] if drhs is None else [_bind(primitive, (lhs, drhs, *bounds), plan)]
        return out, sum(dout[1:], dout[0]) if dout else jnp.zeros_like(out)

    def transpose_operand(ct, *operands, plan):
        return transpose(ad.instantiate_zeros(ct), *operands, plan=plan)

    def batch(operands, axes, *, plan):
        front = [
            x if i is None else jnp.moveaxis(x, i, 0) for x, i in zip(operands, axes, strict=True)
        ]
        mapped = [i is not None for i in axes]
        return sequential_vmap(lambda *one_call: _bind(primitive, one_call, plan), front, mapped), 0

    primitive.def_impl(bounded_jit(function))
    primitive.def_abstract_eval(aval)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    ad.primitive_jvps[primitive] = tangent
    ad.primitive_transposes[primitive] = transpose_operand
    batching.primitive_batchers[primitive] = batch


_define(rows_p, _rows, _rows_shape, _rows_transpose)
_define(groups_p, _groups, _groups_shape, _groups_transpose)
