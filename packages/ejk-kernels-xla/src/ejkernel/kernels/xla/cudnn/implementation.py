"""cuDNN's attention as kernel objects, one for each operation that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.xla.cudnn.core import attend
from ejkernel.kernels.xla.cudnn.support import Pattern, pattern_of, reason_against
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops import KernelNotSupported
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.calls import arguments
from ejkernel.types.masks.combine import mask_of


@dataclass(frozen=True)
class Problem:
    """Arguments for cuDNN, or the reason why it cannot do the call."""

    reason: str | None
    pattern: Pattern | str
    scale: float


class CudnnKernel(XlaKernel):
    """Attention on cuDNN where ``support`` allows it.

    float16 or bfloat16, head_dim a multiple of 8, no mask or causal from the top left, optionally
    with a left window. Raises KernelNotSupported, naming the argument, for everything else.
    """

    # No bias: a row that -inf empties is NaN in cuDNN. No packed sequences: they need run-time
    # lengths. No dropout: cuDNN draws other masks. No lse: cuDNN gives it in the output's dtype.
    reads = arguments.ATTENTION

    def problem(self, a: Mapping[str, Any]) -> Problem:
        reason = reason_against(a)
        pattern = pattern_of(mask_of(a), a["query"].shape[1], a["key"].shape[1])
        return Problem(reason, pattern, a["softmax_scale"])

    def unsupported_reason(self, problem: Problem, target: Any) -> str | None:
        return problem.reason

    def unsupported_error(self, reason: str) -> Exception:
        return KernelNotSupported(
            algorithm=self.call.name,
            platform="cuda",
            argument=reason.partition(":")[0],
            reason=reason,
            nearest="xla",
        )

    def operands(self, a: Mapping[str, Any], problem: Problem) -> Arrays:
        return {name: a[name] for name in ("query", "key", "value")}

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        return (attend(work.problem.pattern, work.problem.scale, q, k, v),), ()


class FlashAttention(CudnnKernel):
    call = calls.FlashAttention
    reads = arguments.ATTENTION | {"precision"}


class ScaledDotProductAttention(CudnnKernel):
    call = calls.ScaledDotProductAttention


flash_attention = FlashAttention()
scaled_dot_product_attention = ScaledDotProductAttention()
