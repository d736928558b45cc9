"""A case as a call of one operation: its arguments, and the work that cannot be avoided."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ejkernel.modules._table import operation_class
from ejkernel.modules.workloads.families import Shape

if TYPE_CHECKING:
    from ejkernel.modules._op import Operation
    from ejkernel.ops.core.invocation import Invocation
    from ejkernel.ops.execution.explanation import Explanation

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1,
         "float8_e5m2": 1}  # fmt: skip
"""Bytes per element."""


@dataclass(frozen=True)
class Call:
    """One call of an operation.

    Attributes:
        operation: name of the public function.
        name: name of the case.
        make: gives the array arguments by name, the same ones every time.
        options: the other arguments by name.
        flops, moved: operations and bytes that the forward pass cannot do without.
        dtype: of the operands of matmuls.
        gradients: names of the arguments that training differentiates; empty for inference.
        backward_factor: operations of the backward pass over operations of the forward pass.
        source, device: as in the case.
    """

    operation: str
    name: str
    make: Callable[[], dict[str, Any]]
    options: Mapping[str, Any]
    flops: float
    moved: float
    dtype: str
    gradients: tuple[str, ...] = ()
    backward_factor: float = 2.5
    source: str = ""
    device: str = "gpu"
    shape: Shape | None = field(default=None, repr=False)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The array arguments, in the order of ``make()``."""
        import jax

        order: list[str] = []

        def make() -> dict[str, Any]:
            arrays = self.make()
            order.extend(arrays)
            return arrays

        jax.eval_shape(make)  # whose own result comes sorted
        return tuple(order)

    def abstract(self) -> dict[str, Any]:
        """All arguments by name, arrays as ``jax.ShapeDtypeStruct``. Computes nothing."""
        import jax

        return {**jax.eval_shape(self.make), **self.options}

    def concrete(self) -> dict[str, Any]:
        """All arguments by name, arrays filled."""
        return {**self.make(), **self.options}

    @property
    def kernel(self) -> Operation:
        return operation_class(self.operation).shared()

    def invocation(self) -> Invocation:
        """Returns the abstract call as the tuner takes it."""
        from ejkernel.ops.core.invocation import call_invocation

        return call_invocation(self.kernel, (), self.abstract())

    def explanation(self, platform: str | None = None) -> Explanation:
        """Returns the explanation of the choice for it here."""
        from ejkernel.modules._executor import get_default_executor

        return get_default_executor().explanation(
            self.kernel, **{"platform": platform, **self.abstract()}
        )


def call_of(shape: Shape, operation: str | None = None, **options: Any) -> Call:
    """Returns the call of ``operation`` that a case describes, built by its family's ``builder``.

    Args:
        shape: the case.
        operation: None = the first that the family serves.
        **options: more arguments of the operation, or other values for arguments of the case.

    Raises:
        ValueError: the case is no call of the operation.
    """
    operation = operation or shape.operations[0]
    if not shape.serves(operation):
        served = ", ".join(filter(shape.serves, shape.operations))
        raise ValueError(f"the shape {shape.name!r} is no call of {operation}, but of {served}")
    module, _, name = shape.builder.partition(".")
    builder = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    fields = builder(shape, operation)
    fields["options"] = {**fields["options"], **options}
    return Call(
        operation, shape.name, source=shape.source, device=shape.device, shape=shape, **fields
    )
