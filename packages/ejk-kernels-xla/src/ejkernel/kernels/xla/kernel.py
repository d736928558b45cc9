"""Base of all XLA implementations: any call, on any device, compiled as one program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from ejkernel.kernels.xla._common.by_rows import run_by_rows
from ejkernel.ops.batch_invariance import batch_invariant, is_batch_invariant
from ejkernel.ops.call_kernel import CallKernel
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.differentiate import Arrays, compiled
from ejkernel.ops.utils.device import device_kind
from ejkernel.types.mods import MODS


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
    by_rows: ClassVar[bool] = False
    """Whether a batch row is a sequence, so that batch-invariant calls are a loop over rows."""
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

    def variant_reason(self, problem: Any) -> str | None:
        for name in MODS:
            if getattr(problem, name, None) is not None:
                return f"{name}: not batch-invariant, its function counts batch rows"
        return None if self.by_rows else super().variant_reason(problem)

    def heuristic(self, call: BoundCall) -> dict[str, Any]:
        # of one row, which chooses for itself
        return {} if call.route.batch_invariant else super().heuristic(call)

    def run_canonical(self, *, cfg: Any = None, **arguments: Any) -> Any:
        run = super().run_canonical
        if not (self.by_rows and is_batch_invariant()):
            return run(cfg=cfg, **arguments)
        a = {**self.call.boundary.defaults, **arguments}
        reason = self._variance_reason(a, self.problem(a))
        if reason is not None:
            raise self.unsupported_error(reason)
        if next(iter(a.values())).shape[0] == 0:
            with batch_invariant(False):
                return run(cfg=cfg, **arguments)
        return run_by_rows(self.call, a, partial(run, cfg=cfg))
