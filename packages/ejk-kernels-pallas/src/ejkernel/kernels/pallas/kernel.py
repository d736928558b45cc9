"""Base of all Pallas kernels: the chip they are made for, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ejkernel.ops.call_kernel import CallKernel


class PallasKernel(CallKernel):
    """A kernel for the chip that ``chip()`` finds."""

    chip: ClassVar[Callable[[], Any]]

    def unavailable_reason(self) -> str | None:
        try:
            self.chip()
        except self.call.Unsupported as error:
            return str(error)
        return None

    def target(self) -> Any:
        return self.chip()
