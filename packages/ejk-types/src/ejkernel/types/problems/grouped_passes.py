"""Passes of grouped matmul by the stages ``forward``, ``dlhs`` and ``drhs``, for several backends.

Stages know the arrays of a call by these names, those that are given::

    lhs          [batch * rows, inner]
    rhs          [held, inner, columns] of every call, or once for all; in ``dlhs`` transposed
    dout         [batch * rows, columns], in ``drhs``
    group_sizes  [groups]; of several calls [batch * (groups + 1)], with the remaining rows
    offset       [1] or [batch]: the first group of the matrices
    existing     [batch * rows, columns]: an array that is added to the result
    scale        [held, columns] float32: scales of 8-bit matrices, not in ``drhs``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel.types.problems.grouped_matmul import GroupedProblem

MAX_LANES = 4096
"""Group sizes of all mapped calls, remaining rows included, that programs hold at once."""

Arrays = dict[str, Any]


MATRIX_OPERANDS = ("rhs", "scale")
"""Operands that calls side by side may share."""


class GroupedPasses:
    """A mixin for kernels with the stages ``forward``, ``dlhs`` and ``drhs``.

    A stage is a function of the work and of operands by name that returns ``{"out": array}``.
    """

    choose: Callable[..., Any]
    run_stage: Callable[..., Arrays]
    float32_precision: ClassVar[str] = "tf32"
    """Name of the fast precision of float32 matmuls in a problem."""

    def forward(self, work: Any, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p = work.problem
        operands = {
            "lhs": arrays["lhs"].astype(p.dtype),
            **_matrix_operands(arrays, arrays.get("rhs_scale"), p),
            "existing": arrays.get("existing_out"),
        }
        return (self._stage_output("forward", work, operands),), ()

    def backward(
        self, work: Any, arrays: Arrays, outputs: Any, saved: Any, cotangents: Sequence[Any]
    ) -> Mapping[str, Any]:
        p, (dout,) = work.problem, cotangents
        grads = {"existing_out": dout} if "existing_out" in arrays else {}
        if p.dtype == "float16" and p.out != "float16":
            # the range of float16 would clip gradients that the result's dtype can hold
            p = replace(p, dtype="float32", precision=self.float32_precision)
            work = replace(work, problem=p, tiles=self.choose(p, work.target))
        dout, scale = scale_cotangent(dout, arrays, p)
        dout, flipped = dout.astype(p.dtype), replace(work, problem=p.flipped())
        operands = {"lhs": dout, **_matrix_operands(arrays, scale, flipped.problem)}
        grads["lhs"] = self._stage_output("dlhs", flipped, operands)
        if not p.stored:
            operands = {"lhs": arrays["lhs"].astype(p.dtype), "dout": dout}
            grads["rhs"] = self._stage_output("drhs", work, operands | _group_operands(arrays))
        return grads

    def _stage_output(self, stage: str, work: Any, operands: Arrays) -> jax.Array:
        operands = {name: x for name, x in operands.items() if x is not None}
        return self.run_stage(stage, work, operands)["out"]


def _group_operands(arrays: Arrays) -> Arrays:
    """Returns the group sizes and the offset ``[1]``."""
    offset = arrays.get("group_offset")
    offset = None if offset is None else offset.reshape(1)
    return {"group_sizes": arrays["group_sizes"], "offset": offset}


def _matrix_operands(arrays: Arrays, scale: jax.Array | None, p: GroupedProblem) -> Arrays:
    """Returns the matrices that a stage multiplies with, their scale, and their groups."""
    return {
        "rhs": arrays["rhs"] if p.stored else arrays["rhs"].astype(p.dtype),
        "scale": None if scale is None else column_scale(scale, p),
        **_group_operands(arrays),
    }


def column_scale(scale: jax.Array, p: GroupedProblem) -> jax.Array:
    """Returns the scale of 8-bit matrices, ``[held, columns]`` in float32."""
    scale = scale[:, None] if scale.ndim == 1 else scale
    return jnp.broadcast_to(scale.astype(jnp.float32), (p.held, p.columns))


def scale_cotangent(
    dout: jax.Array, arrays: Arrays, p: GroupedProblem
) -> tuple[jax.Array, jax.Array | None]:
    """Returns what the gradient of ``lhs`` multiplies with 8-bit matrices, and their scale there.

    That gradient is a sum over the columns, whose scales are therefore factors of ``dout``; a scale
    of a full matrix is left for the accumulator, which rounds nothing. So is the largest scale of
    columns: without it, small scales would take the cotangent out of the range of float16.
    """
    scale = arrays.get("rhs_scale")
    if scale is None or scale.ndim < 2:
        return dout, scale
    scale = scale.astype(jnp.float32)
    largest = jnp.max(jnp.abs(scale), axis=1)
    relative = scale / jnp.where(largest > 0, largest, 1)[:, None]
    return dout.astype(jnp.float32) * relative[_matrix_of_rows(arrays, p)], largest


def _matrix_of_rows(arrays: Arrays, p: GroupedProblem) -> jax.Array:
    """Returns the index of the matrix of every row, any for rows without a matrix."""
    row = jnp.arange(p.rows, dtype=jnp.int32)
    ends = _row_ends(arrays["group_sizes"], p.rows)
    matrix = jnp.searchsorted(ends, row, side="right", method="compare_all")
    offset = arrays.get("group_offset")
    matrix = matrix if offset is None else matrix - offset.reshape(())
    return jnp.clip(matrix, 0, p.held - 1)


def fold_groups(
    problem: GroupedProblem, size: int, operands: Mapping[str, Any], is_batched: Mapping[str, bool]
) -> tuple[GroupedProblem, Arrays] | None:
    """Returns ``size`` calls of a stage as one of more groups; None for too many groups.

    Batched operands have the mapped axis in front. Matrices, with their scale, stay shared until
    either is batched.
    """
    p = problem
    if size * p.batch * (p.groups + 1) > MAX_LANES:
        return None
    folded = dict(operands)
    if folded["group_sizes"].shape[-1] == p.groups:
        folded["group_sizes"] = add_remaining_rows(folded["group_sizes"], p.rows)
    shared = p.shared and not any(is_batched.get(name, False) for name in MATRIX_OPERANDS)
    for name, x in folded.items():
        batched = is_batched[name]
        if name in MATRIX_OPERANDS:
            if not shared:
                matrix = x.shape[-1:] if name == "scale" else x.shape[-2:]
                calls = (size if batched else 1, 1 if p.shared else p.batch)
                x = x.reshape(*calls, p.held, *matrix)
                x = jnp.broadcast_to(x, (size, p.batch, p.held, *matrix))
                folded[name] = x.reshape(-1, *matrix)
        elif name == "offset" and x.shape[-1] == 1:  # an offset may serve all calls
            folded[name] = jnp.repeat(x.reshape(-1), p.batch) if batched else x
        else:
            shape = x.shape[1:] if batched else x.shape
            x = x if batched else jnp.broadcast_to(x, (size, *shape))
            folded[name] = x.reshape(size * shape[0], *shape[1:])
    return replace(p, batch=size * p.batch, shared=shared), folded


def add_remaining_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns sizes ``[..., groups + 1]`` clipped to the rows, the remaining rows last."""
    ends = _row_ends(sizes, rows)
    edge = jnp.zeros_like(ends[..., :1])
    return jnp.diff(jnp.concatenate([edge, ends, edge + rows], -1), axis=-1)


def _row_ends(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the row past the last of every group, clipped to the rows."""
    # clipped one by one, no sum can wrap around
    return jax.lax.associative_scan(
        lambda a, b: jnp.minimum(a + b, rows), jnp.clip(sizes, 0, rows), axis=-1
    )
