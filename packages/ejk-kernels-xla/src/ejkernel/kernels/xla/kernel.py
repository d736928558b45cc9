"""Base of all XLA implementations: any call, on any device, compiled as one program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.differentiate import Arrays, compiled
from ejkernel.ops.utils.device import device_kind


class XlaKernel(CallKernel):
    """A kernel of JAX operations that looks arguments up by name.

    ``work.problem`` holds every argument, with shapes in place of arrays; ``arrays`` holds the
    arrays of the call. A kernel returns the outputs of the operation, also for calls without work.
    JAX differentiates ``forward``, which then names its residuals itself, unless a kernel
    ``has_backward``.
    """

    has_backward: ClassVar[bool] = False
    forward_again: ClassVar[bool] = True
    outputs = staticmethod(compiled)
    heads_first: ClassVar[bool] = False
    partitioned: ClassVar[bool] = False  # the compiler partitions operations of JAX itself

    def target(self) -> Any:
        return device_kind()

    def problem(self, a: Mapping[str, Any]) -> Any:
        return self.call.static_arguments(a)

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        return self.call.array_arguments(a)

    def forward_axes(self, a: Mapping[str, Any], count: int) -> tuple[str, ...]:
        return self.call.returned_axes(a, count)

    def empty_outputs(self, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        return None

    def results(self, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        outputs = self.call.select_outputs(a, outputs)
        return outputs[0] if len(outputs) == 1 else outputs
