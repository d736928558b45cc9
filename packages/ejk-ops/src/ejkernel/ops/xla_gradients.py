"""Gradients by the XLA implementation of an operation, for kernels that serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ejkernel.ops.core.keys import has_gradient
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.kernel_registry import kernel_registry


class XlaGradients:
    """A mixin of ``CallKernel`` for operations that are rarely differentiated.

    8-bit arrays get no gradient, nor do trees of arrays.
    """

    call: Any

    def backward(
        self,
        work: Work,
        arrays: Arrays,
        outputs: tuple[Any, ...],
        saved: Any,
        cotangents: tuple[Any, ...],
    ) -> Mapping[str, Any]:
        """Returns the gradients that JAX makes of the XLA implementation."""
        reference = kernel_registry.get(self.call.name, "xla")
        run = getattr(reference, "run_canonical", reference)  # a function has none
        options = work.options._asdict()
        floats = {name: x for name, x in arrays.items() if has_gradient(x)}

        def compute(floats: dict[str, Any]) -> Any:
            return run(cfg=None, **(options | arrays | floats))

        cotangent = cotangents if len(cotangents) > 1 else cotangents[0]
        return jax.vjp(compute, floats)[1](cotangent)[0]
