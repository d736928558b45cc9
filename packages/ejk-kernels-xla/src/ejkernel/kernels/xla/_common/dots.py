"""Dtype policy and the batched matmuls of attention.

Matmuls take their operands in the promoted input dtype and accumulate in at least float32. Under
``precision="highest"`` the operands are converted to it too, so that probabilities are not rounded
to a narrow dtype before they are multiplied with the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.utils.device import device_kind
from ejkernel.types.arrays import result_dtype


def accumulation_dtype(*arrays: Any, at_least: Any = jnp.float32) -> np.dtype:
    """float64 when any array or ``at_least`` is float64 (and JAX has it), else float32."""
    wide = jnp.dtype(at_least) == np.float64 and jax.config.jax_enable_x64  # ty: ignore[missing-attribute]
    wide = wide or any(a.dtype == np.float64 for a in arrays)
    return np.dtype(np.float64 if wide else np.float32)


def is_highest(precision: Any) -> bool:
    """Returns whether ``precision`` asks for the most exact matmul."""
    if isinstance(precision, (tuple, list)):
        return any(is_highest(p) for p in precision)
    return precision in ("highest", "float32") or precision == jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class DotPolicy:
    """Operand dtype, accumulation dtype and precision of matmuls."""

    operand: np.dtype
    accumulate: np.dtype
    precision: Any = None

    @classmethod
    def for_arrays(
        cls, *arrays: Any, precision: Any = None, at_least: Any = jnp.float32
    ) -> DotPolicy:
        """Returns the policy for matmuls of ``arrays``; ``at_least`` is a lower bound on logits."""
        acc = accumulation_dtype(*arrays, at_least=at_least)
        operand = result_dtype(*(a.dtype for a in arrays))
        if acc == np.dtype(jnp.float64) or is_highest(precision):
            operand = acc
        if isinstance(precision, list):
            precision = tuple(precision)
        return cls(operand, acc, precision)

    def dot(self, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        """``a`` times ``b`` over axes ``contract``; all axes but the last two are batch axes."""
        batch = tuple(range(a.ndim - 2))
        contracting = ((contract[0] % a.ndim,), (contract[1] % b.ndim,))
        a, b = a.astype(self.operand), b.astype(self.operand)
        if self.operand.itemsize < 4 and device_kind() == "cpu":
            # XLA's CPU matmuls of narrow operands into float32 fail for some shapes ("Unsupported
            # element type for DotThunk"); it converts the others itself
            a, b = a.astype(self.accumulate), b.astype(self.accumulate)
        return jax.lax.dot_general(
            a,
            b,
            (contracting, (batch, batch)),
            precision=self.precision,
            preferred_element_type=self.accumulate,
        )

    def rows_cols(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """``a @ b.T``: ``[.., m, c]`` and ``[.., n, c]`` -> ``[.., m, n]``."""
        return self.dot(a, b, (-1, -1))

    def weigh(self, p: jax.Array, x: jax.Array) -> jax.Array:
        """``p @ x``: ``[.., m, n]`` and ``[.., n, c]`` -> ``[.., m, c]``."""
        return self.dot(p, x, (-1, -2))
