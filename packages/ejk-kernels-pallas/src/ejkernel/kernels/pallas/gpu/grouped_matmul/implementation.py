"""Grouped matmul on Hopper as one kernel object: its stages that are faster than Triton's.

The kernel for every GPU (``ejkernel.kernels.triton``, found through the registry) computes the
result and the gradient of lhs; its stage ``drhs`` is replaced. With matrices of 8 bits, which have
no gradient, the stages ``forward`` and ``dlhs`` are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.gpu.common.chip import current_chip
from ejkernel.kernels.pallas.gpu.common.tma import COPY_ROWS
from ejkernel.kernels.pallas.gpu.grouped_matmul.eight_bit import MULTIPLE, EightBitMatmul
from ejkernel.kernels.pallas.gpu.grouped_matmul.weights import ACROSS, DOWN, PIECE, ROWS, Weights
from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import ComposedKernel, Stage, fold_mapped
from ejkernel.ops.varying import vary, varying_axes
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.problems.grouped_matmul import GroupedProblem
from ejkernel.types.problems.grouped_passes import GroupedPasses

DTYPES = ("float16", "bfloat16")
EIGHT_BIT_ROWS = 256  # of a mean group: from there on 8-bit matrices are faster here


def matrix_shape(p: GroupedProblem) -> tuple[int, int]:
    """Returns rows and columns of a matrix as it is stored."""
    return (p.columns, p.inner) if p.transposed else (p.inner, p.columns)


def has_short_tiles(p: GroupedProblem) -> bool:
    """Returns whether most tiles have one step."""
    return p.mean_rows <= ROWS


def weights_kernel(p: GroupedProblem, cores: int) -> Weights:
    """Returns the kernel of the gradient of the matrices."""
    down, across = matrix_shape(p)
    staged, piece = 2, PIECE
    # 256 matrices, each 8 tiles across: 3.05 ms, with bands of 16 3.06; of Zipf's 3.92 and 3.95
    band = 8 if not has_short_tiles(p) and across <= 8 * ACROSS else 16
    if has_short_tiles(p) and across % (2 * PIECE) == 0:
        # tiles of one step are stored in few copies: 128 matrices 0.120 ms, not 0.126
        staged, piece = 1, 2 * PIECE
    return Weights(
        rows=p.batch * p.rows, down=down, across=across, batch=p.batch, groups=p.groups,
        held=p.held, dtype=p.dtype, cores=cores, staged=staged, piece=piece, band=band,
    )  # fmt: skip


def eight_bit_kernel(p: GroupedProblem, cores: int) -> EightBitMatmul:
    """Returns the kernel of the result with 8-bit matrices, or of the gradient of lhs."""
    return EightBitMatmul(
        rows=p.batch * p.rows, inner=p.inner, columns=p.columns, batch=p.batch, groups=p.groups,
        matrices=p.held, shared=p.shared, transposed=p.transposed, dtype=p.dtype, stored=p.stored,
        cores=cores,
    )  # fmt: skip


def multiply_8_bit(work: Work, arrays: Arrays) -> Arrays:
    """Returns the rows of every group times the 8-bit matrix of the group."""
    (out,) = fold_mapped(_multiply_8_bit, work, arrays)
    return {"out": out}


def _multiply_8_bit(work: Work, arrays: Arrays) -> tuple[jax.Array]:
    kernel = eight_bit_kernel(work.problem, work.target.cores)
    axes = varying_axes(*arrays.values())
    offset = arrays.get("offset")
    with jax.enable_x64(False):  # the kernel counts in int32
        offset = None if offset is None else offset.astype(jnp.int32)
        sizes = arrays["group_sizes"].astype(jnp.int32)
        out = kernel(arrays["lhs"], arrays["rhs"], sizes, offset, arrays.get("scale"))
    return (vary(out, axes),)


def drhs(work: Work, arrays: Arrays) -> Arrays:
    """Returns the gradient of rhs."""
    (gradient,) = fold_mapped(_compute_drhs, work, arrays)
    return {"out": gradient}


def _compute_drhs(work: Work, arrays: Arrays) -> tuple[jax.Array]:
    """Returns ``[batch * held, inner, columns]``, or its transpose for transposed matrices."""
    p = work.problem
    axes = varying_axes(*arrays.values())
    kernel = weights_kernel(p, work.target.cores)
    names = ("dout", "lhs") if p.transposed else ("lhs", "dout")
    a, b = (arrays[name] for name in names)
    integers = [arrays[name] for name in ("group_sizes", "offset") if name in arrays]
    with jax.enable_x64(False):  # the kernel counts in int32
        gradient = kernel(a, b, *(x.astype(jnp.int32) for x in integers))
    return (vary(gradient, axes),)


class GroupedMatmul(GroupedPasses, ComposedKernel, PallasKernel):
    """Consecutive runs of rows, each times its own matrix, on a Hopper GPU; see the operation of
    this name.

    This kernel computes the gradient of rhs: float16 or bfloat16, rows in multiples of 8, both axes
    of the matrices in multiples of 64, at least 128 and 256. With matrices of 8 bits it computes
    the result, without ``existing_out`` and in the dtype of lhs, and the gradient of lhs: float16
    or bfloat16 lhs, rows in multiples of 8, both axes in multiples of 128. The implementation for
    every GPU, which must be installed, does the other parts. Two runs give the same bits. ``cfg``
    is that of the implementation for every GPU.

    Source: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3; Shah et al. 2024,
    FlashAttention-3 (arXiv 2407.08608), section 3.1.
    """

    call = calls.GroupedMatmul
    reads = arguments.GROUPED_PRODUCT | {"preferred_element_type", "precision", "rhs_scale"}
    base_platform = "triton"
    chip = staticmethod(current_chip)
    stages: ClassVar[Mapping[str, Stage]] = {
        "forward": multiply_8_bit,
        "dlhs": multiply_8_bit,
        "drhs": drhs,
    }

    def replaces(self, stage: str, problem: GroupedProblem) -> bool:
        """Returns whether this kernel's stage computes a problem; else the base does."""
        p = problem
        if p.dtype not in DTYPES:  # float16 may be too small for gradients of other results
            return False
        return stage == "drhs" or (bool(p.stored) and not p.added and p.out == p.dtype)

    def unsupported_reason(self, problem: Any, target: Any) -> str | None:
        p, reason = problem, super().unsupported_reason(problem, target)
        if reason is not None:
            return reason
        if p.dtype not in DTYPES:
            return f"lhs: {p.dtype} is not supported, only {' and '.join(DTYPES)}"
        if p.rows % COPY_ROWS:
            return f"lhs: {p.rows} rows are no multiple of {COPY_ROWS}"
        down, across = matrix_shape(p)
        if p.stored:
            if down % MULTIPLE or across % MULTIPLE:
                return f"rhs: 8-bit matrices of {down} x {across} are no multiples of {MULTIPLE}"
            return None
        if down % PIECE or across % PIECE or down < DOWN or across < ACROSS:
            return (
                f"rhs: matrices of {down} x {across}, as they are stored, are no multiples of "
                f"{PIECE} or smaller than {DOWN} x {ACROSS}"
            )
        return None

    def neighbours(self, problem: Any, target: Any, chosen: Any) -> Iterable[Any]:
        """Returns no tiles with 8-bit matrices, whose kernel chooses its own."""
        return () if problem.stored else super().neighbours(problem, target, chosen)

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU where it was faster than theirs."""
        p, cores = self.problem_of(call), self.target().cores
        if p.stored:
            return 110 if p.mean_rows >= EIGHT_BIT_ROWS else 90
        kernel = weights_kernel(p, cores)
        is_large = not has_short_tiles(p) or kernel.piece > PIECE
        return 110 if is_large and kernel.tiles >= cores else 90


grouped_matmul = GroupedMatmul()
