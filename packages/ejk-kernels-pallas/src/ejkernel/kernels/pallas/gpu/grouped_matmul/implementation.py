"""Grouped matmul on Hopper as one kernel object: the gradient of the matrices.

The kernels for every GPU (``ejkernel.kernels.triton``, found through the registry) define a
call, map it, and compute the result and the gradient of lhs; one of their launches is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.gpu.common.hybrid import HybridKernel
from ejkernel.kernels.pallas.gpu.common.tma import GROUP
from ejkernel.kernels.pallas.gpu.grouped_matmul.weights import ACROSS, DOWN, PIECE, ROWS, Weights
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.varying import vary, varying_axes
from ejkernel.types import calls
from ejkernel.types.calls import arguments

DTYPES = ("float16", "bfloat16")


def stored(p: Any) -> tuple[int, int]:
    """Rows and columns of a matrix as it is stored."""
    return (p.columns, p.inner) if p.transposed else (p.inner, p.columns)


@dataclass(frozen=True)
class WeightGradient:
    """Gradient of the matrices, in place of the launch for every GPU.

    Attributes:
        cores: multiprocessors.
    """

    cores: int

    @staticmethod
    def short(p: Any) -> bool:
        """Returns whether most tiles have one step."""
        return p.mean_rows <= ROWS

    def kernel(self, p: Any) -> Weights:
        down, across = stored(p)
        staged, piece = 2, PIECE
        # 256 matrices, each 8 tiles across: 3.05 ms, with bands of 16 3.06; of Zipf's 3.92 and 3.95
        band = 8 if not self.short(p) and across <= 8 * ACROSS else 16
        if self.short(p) and across % (2 * PIECE) == 0:
            # tiles of one step are stored in few copies: 128 matrices 0.120 ms, not 0.126
            staged, piece = 1, 2 * PIECE
        return Weights(
            rows=p.batch * p.rows, down=down, across=across, batch=p.batch, groups=p.groups,
            held=p.held, dtype=p.dtype, cores=self.cores, staged=staged, piece=piece,
            band=band,
        )  # fmt: skip

    def __call__(
        self, p: Any, lhs: jax.Array, dout: jax.Array, sizes: jax.Array, offset: jax.Array | None
    ) -> jax.Array:
        """``[batch * held, inner, columns]``, or its transpose for transposed matrices."""
        operands = [x for x in (lhs, dout, sizes, offset) if x is not None]
        axes = varying_axes(*operands)
        a, b = (dout, lhs) if p.transposed else (lhs, dout)
        kernel = self.kernel(p)
        with jax.enable_x64(False):  # the kernel counts in int32
            gradient = kernel(a, b, *(x.astype(jnp.int32) for x in operands[2:]))
        return vary(gradient, axes)


class GroupedMatmul(HybridKernel):
    """Consecutive runs of rows, each times its own matrix, on a Hopper GPU; see the operation of
    this name.

    This kernel computes the gradient of rhs: float16 or bfloat16, rows in multiples of 8, both axes
    of the matrices in multiples of 64, at least 128 and 256. The implementation for every GPU,
    which must be installed, does the other parts. Two runs give the same bits. ``cfg`` is that of
    the implementation for every GPU.

    Source: Gale et al. 2022, "MegaBlocks" (arXiv 2211.15841), section 3; Shah et al. 2024,
    FlashAttention-3 (arXiv 2407.08608), section 3.1.
    """

    call = calls.GroupedMatmul
    reads = arguments.GROUPED_PRODUCT | {"preferred_element_type", "precision"}

    def unsupported_reason(self, problem: Any, target: Any) -> str | None:
        p, reason = problem, self.triton_kernel.unsupported_reason(problem, target)
        if reason is not None:
            return reason
        if p.stored:
            return f"rhs: {p.stored} has no gradient, which is all that is done here"
        if p.dtype not in DTYPES:
            return f"lhs: {p.dtype} is not supported, only {' and '.join(DTYPES)}"
        if p.rows % GROUP:
            return f"lhs: {p.rows} rows are no multiple of {GROUP}"
        down, across = stored(p)
        if down % PIECE or across % PIECE or down < DOWN or across < ACROSS:
            return (
                f"rhs: matrices of {down} x {across}, as they are stored, are no multiples of "
                f"{PIECE} or smaller than {DOWN} x {ACROSS}"
            )
        return None

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU where it was faster than theirs."""
        p, gradient = self.problem_of(call), WeightGradient(self.target().cores)
        kernel = gradient.kernel(p)
        large = not gradient.short(p) or kernel.piece > PIECE
        return 110 if large and kernel.tiles >= gradient.cores else 90

    def choose(self, problem: Any, target: Any) -> Any:
        tiles = self.triton_kernel.choose(problem, target)
        return replace(tiles, whole=WeightGradient(target.cores))

    def fields(self, chosen: Any) -> dict[str, Any]:
        return chosen.fwd.fields


grouped_matmul = GroupedMatmul()
