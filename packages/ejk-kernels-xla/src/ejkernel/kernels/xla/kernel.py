"""What all XLA implementations have in common: any call, on any device, compiled as one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax

from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.differentiate import Arrays, Work, differentiable
from ejkernel.ops.second_order import running
from ejkernel.ops.utils.device import device_kind


@partial(jax.jit, static_argnums=0)
def compiled(work: Work, arrays: Arrays) -> tuple[Any, ...]:
    """The outputs as one program: JAX keeps its derivative and traces it once, outside jit too."""
    kernel = work.kernel
    with running(work.operation):
        if kernel.differentiable:
            return differentiable(work, arrays)
        return kernel.forward(work, arrays)[0]


class XlaKernel(CallKernel):
    """A kernel of JAX operations, which knows a call by the names of its arguments.

    ``work.problem`` holds them all, with shapes in place of arrays; ``arrays`` the arrays that
    were given. The outputs are those of the operation, also of calls without work. JAX
    differentiates ``forward``, which then names its residuals itself, unless a kernel says that it
    is ``differentiable`` by a ``backward`` of its own.
    """

    differentiable: ClassVar[bool] = False
    forward_again: ClassVar[bool] = True
    outputs = staticmethod(compiled)

    def target(self) -> Any:
        return device_kind()

    def problem(self, a: Mapping[str, Any]) -> Any:
        return self.call.facts(a)

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        return self.call.given(a)

    def without_work(self, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        return None

    def results(self, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        outputs = self.call.asked(a, outputs)
        return outputs[0] if len(outputs) == 1 else outputs
