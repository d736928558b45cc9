"""Hopper kernels that run the large part of a call; Triton kernels run the other parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from ejkernel.kernels.pallas.gpu.common.chip import current_chip
from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.ops import kernel_registry
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.errors import KernelNotFound, KernelNotSupported


class HybridKernel(PallasKernel):
    """A hybrid kernel that leaves all but one part of a call to ``ejkernel.kernels.triton``.

    The Triton kernel is found through the registry, since this package does not depend on it. It
    defines and runs the call; its tiles, as ``choose`` returns them here, hold the replacement of
    one part. An argument is read only if both kernels read it.
    """

    chip = staticmethod(current_chip)

    @cached_property
    def triton_kernel(self) -> Any:
        """The Triton kernel, which runs the other parts of a call.

        Raises:
            KernelNotFound, KernelNotSupported: it is not installed, or cannot run here.
        """
        return kernel_registry.get(self.call.name, "triton")

    def unavailable_reason(self) -> str | None:
        reason = super().unavailable_reason()
        if reason is None:
            try:
                reason = self.triton_kernel.unavailable_reason()
            except (KernelNotFound, KernelNotSupported) as error:
                reason = f"part of the work is done by the Triton kernels: {error}"
        return reason

    def target(self) -> Any:
        return self.triton_kernel.target()

    def unread_argument(self, a: Mapping[str, Any]) -> str | None:
        return super().unread_argument(a) or self.triton_kernel.unread_argument(a)

    def problem(self, a: Mapping[str, Any]) -> Any:
        return self.triton_kernel.problem(a)

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        return self.triton_kernel.operands(a, problem)

    def empty_outputs(self, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        return self.triton_kernel.empty_outputs(a, problem)

    def neighbours(self, problem: Any, target: Any, chosen: Any) -> Iterable[Any]:
        return self.triton_kernel.neighbours(problem, target, chosen)

    def apply_config(self, chosen: Any, cfg: Any, problem: Any, target: Any) -> Any:
        return self.triton_kernel.apply_config(chosen, cfg, problem, target)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        return self.triton_kernel.forward(work, arrays)

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        return self.triton_kernel.backward(work, arrays, outputs, saved, cotangents)
