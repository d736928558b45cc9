"""Grouped matmul on TPU as one kernel object: what it takes, its tiles, its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.grouped_matmul import tiles
from ejkernel.kernels.pallas.tpu.grouped_matmul.forward import forward
from ejkernel.kernels.pallas.tpu.grouped_matmul.tiles import GroupedTiles
from ejkernel.kernels.pallas.tpu.grouped_matmul.weights import rhs_gradient
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.arrays import NO_LEVEL, precision_level, result_dtype
from ejkernel.types.calls import arguments
from ejkernel.types.problems.grouped_matmul import GroupedProblem
from ejkernel.types.problems.grouped_passes import column_scale, scale_cotangent

DTYPES = ("bfloat16", "float32")
INVARIANT_ROWS = 1024  # of a group in every batch-invariant call, whatever the number of rows
EIGHT_BIT = ("int8", "float8_e4m3fn", "float8_e5m2")


class GroupedMatmul(PallasKernel):
    """Consecutive runs of rows, each times its own matrix, on a TPU.

    bfloat16 and float32, promoted to one dtype and summed in float32, with matrices of the same or
    of 8 bits, which have no gradient. ``precision`` of float32: None is one bfloat16 pass, "high"
    and "highest" float32.
    Two runs give the same bits. Differentiable once. Under ``vmap`` the calls run one after the
    other. ``cfg``: block_m, block_n, block_k of the result, in whole registers; the gradients have
    their own.
    """

    call = calls.GroupedMatmul
    reads = arguments.GROUPED_PRODUCT | {"preferred_element_type", "precision", "rhs_scale"}
    chip = staticmethod(current_chip)
    choose = staticmethod(tiles.choose)

    def problem(self, a: Mapping[str, Any]) -> GroupedProblem:
        dtype = result_dtype(a["lhs"].dtype, a["rhs"].dtype).name
        return GroupedProblem.from_call(a, precision_level(a["precision"], dtype) or "")

    def variant_reason(self, problem: GroupedProblem) -> str | None:
        return None  # the matrix units multiply every row of a block alike

    def sequence_problem(self, problem: GroupedProblem) -> GroupedProblem:
        return replace(problem, batch=1, rows=INVARIANT_ROWS * problem.groups)

    def unsupported_reason(self, problem: GroupedProblem, target: Chip) -> str | None:
        p, allowed = problem, " and ".join(DTYPES)
        if p.dtype not in DTYPES:
            return f"lhs: {p.dtype} is not supported, only {allowed}"
        if p.out not in DTYPES:
            return f"preferred_element_type: {p.out} is not supported, only {allowed}"
        if p.stored and p.stored not in EIGHT_BIT:
            return f"rhs: {p.stored} is not supported, only {', '.join((*DTYPES, *EIGHT_BIT))}"
        return None if p.precision else NO_LEVEL

    def neighbours(
        self, problem: GroupedProblem, target: Chip, chosen: GroupedTiles
    ) -> Iterable[GroupedTiles]:
        return (replace(chosen, fwd=t) for t in tiles.neighbours(chosen.fwd, problem))

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, lhs, existing = _with_whole_block(work, arrays["lhs"], arrays.get("existing_out"))
        rhs = arrays["rhs"]
        scale = _scale(arrays.get("rhs_scale"), p)
        rhs = rhs if p.stored else rhs.astype(p.dtype)
        out = forward(
            *(p, work.tiles.fwd, work.target),
            *(lhs.astype(p.dtype), rhs, *_groups(arrays), existing, scale),
        )
        return (out[: work.problem.rows],), ()

    def backward(
        self, work: Work, arrays: Arrays, outputs: Any, saved: Any, cotangents: Any
    ) -> Mapping[str, Any]:
        t, chip, (cotangent,) = work.tiles, work.target, cotangents
        scaled, scale = scale_cotangent(cotangent, arrays, work.problem)
        p, dout, lhs = _with_whole_block(work, scaled.astype(work.problem.dtype), arrays["lhs"])
        flipped, groups = p.flipped(), _groups(arrays)
        rhs = arrays["rhs"] if p.stored else arrays["rhs"].astype(p.dtype)
        dlhs = forward(flipped, t.dlhs, chip, dout, rhs, *groups, scale=_scale(scale, flipped))
        gradients = {"existing_out": cotangent} if p.added else {}
        gradients["lhs"] = dlhs[: work.problem.rows]
        if not p.stored:
            gradients["rhs"] = rhs_gradient(p, t.drhs, chip, lhs.astype(p.dtype), dout, *groups)
        return gradients


def _with_whole_block(
    work: Work, x: jax.Array, other: Any
) -> tuple[GroupedProblem, jax.Array, Any]:
    """Returns the problem and the arrays, of which ``other`` may be None, with rows for one block
    at least: a batch-invariant call has the blocks of other calls."""
    p, t = work.problem, work.tiles
    missing = max(t.fwd.rows, t.dlhs.rows, t.drhs.rows) - p.rows
    if not work.batch_invariant or missing <= 0:
        return p, x, other
    rows = ((0, missing), (0, 0))
    other = None if other is None else jnp.pad(other, rows)
    return replace(p, rows=p.rows + missing), jnp.pad(x, rows), other


def _groups(arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    """Returns the sizes and the offset ``[]``."""
    offset = arrays.get("group_offset")
    return arrays["group_sizes"], None if offset is None else offset.reshape(())


def _scale(scale: jax.Array | None, p: GroupedProblem) -> jax.Array | None:
    """Returns the scales of 8-bit matrices, float32 ``[held, 1, columns]``, or None.

    The kernel reads scales of all 8-bit matrices: ones, where the call has none.
    """
    if not p.stored:
        return None
    return column_scale(jnp.ones(()) if scale is None else scale, p)[:, None]


grouped_matmul = GroupedMatmul()
