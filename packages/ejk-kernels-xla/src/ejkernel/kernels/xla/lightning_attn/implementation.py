"""Lightning attention: linear attention whose decay follows from head and layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.xla._linear.kernel import LinearKernel
from ejkernel.ops.differentiate import Arrays
from ejkernel.types import calls


class LightningAttention(LinearKernel):
    """Linear attention with one decay a head and layer.

        gamma[m] = -(8 / h) * (1 - layer_idx / num_layers) * m        for head m of h

    ``cfg``: ``time_tile``, the chunk length, a power of two. Differentiable in query, key, value
    and initial_state, as ``recurrent_attention``.
    """

    call = calls.LightningAttention

    def gates(self, problem: Any, arrays: Arrays) -> Arrays:
        decay = slopes(problem.query.shape[2], problem.layer_idx, problem.num_layers)
        return {"g_gamma": jnp.asarray(decay, jnp.result_type(float))}


def slopes(heads: int, layer: int, layers: int) -> np.ndarray:
    """Log decay per token of every head, float64 ``[h]``: steeper with the head, 0 at the top."""
    return -8.0 / max(heads, 1) * (1.0 - layer / layers) * np.arange(heads)


lightning_attention = LightningAttention()
