"""Grouped matmul in Triton as one kernel object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.grouped_matmul import tiles
from ejkernel.kernels.triton.grouped_matmul.backward_rhs import GroupedDrhs
from ejkernel.kernels.triton.grouped_matmul.forward import GroupedForward
from ejkernel.kernels.triton.grouped_matmul.forward_8bit import GroupedForward8Bit
from ejkernel.kernels.triton.grouped_matmul.tiles import Passes, Problem, Tiles
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.problems.grouped_passes import GroupedPasses

INVARIANT_ROWS = 1024  # of a group, whatever the number of rows


def forward(work: Work, arrays: Arrays) -> Arrays:
    """Returns the rows of every group times the matrix of the group."""
    return _multiply(work.problem, work.tiles.fwd, arrays)


def dlhs(work: Work, arrays: Arrays) -> Arrays:
    """Returns the gradient of lhs, for the flipped problem."""
    return _multiply(work.problem, work.tiles.dlhs, arrays)


def drhs(work: Work, arrays: Arrays) -> Arrays:
    """Returns the gradient of rhs."""
    return call(GroupedDrhs(work.problem, work.tiles.drhs), **arrays)


def _multiply(problem: Problem, chosen: Tiles, arrays: Arrays) -> Arrays:
    launch = GroupedForward8Bit if problem.stored else GroupedForward
    return call(launch(problem, chosen), **arrays)


class GroupedMatmul(GroupedPasses, TritonKernel, StagedKernel):
    """Contiguous groups of rows, each times its own matrix, on a GPU.

    float16, bfloat16 and float32, accumulated in float32, and 8-bit matrices whose last axis is
    even, which have no gradient; at most 4095 groups. Two calls give the same bits. Differentiable
    once. ``vmap`` is one launch over the groups of all calls, up to 4096; then the calls run one
    after the other.
    ``cfg``: block_m, block_n, block_k, num_warps, num_stages of the forward pass and of the
    gradient of lhs; the gradient of rhs has its own.
    """

    call = calls.GroupedMatmul
    reads = arguments.GROUPED_PRODUCT | {"preferred_element_type", "precision", "rhs_scale"}
    choose = staticmethod(tiles.choose_all)
    stages: ClassVar[Mapping[str, Stage]] = {"forward": forward, "dlhs": dlhs, "drhs": drhs}

    def variant_reason(self, problem: Any) -> str | None:
        return None

    def sequence_problem(self, problem: Problem) -> Problem:
        # as many rows as fill a GPU with full tiles
        return replace(problem, batch=1, rows=INVARIANT_ROWS * problem.groups)

    def problem(self, a: Mapping[str, Any]) -> Problem:
        reason = tiles.unsupported_reason(a)
        if reason is not None:
            raise self.call.Unsupported(reason)
        return tiles.problem_of(a)

    def neighbours(self, problem: Problem, target: Target, chosen: Passes) -> Iterable[Passes]:
        return (replace(chosen, fwd=t) for t in tiles.neighbours(problem, target))


grouped_matmul = GroupedMatmul()
