"""What all Triton kernels have in common: what they need, and what they are compiled for."""

from __future__ import annotations

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.targets import Target, current_target, too_old
from ejkernel.ops.call_kernel import CallKernel


class TritonKernel(CallKernel):
    """A kernel for GPUs, launched through the bridge."""

    def missing(self) -> str | None:
        return compat.problem() or too_old(self.target())

    def target(self) -> Target:
        return current_target()
