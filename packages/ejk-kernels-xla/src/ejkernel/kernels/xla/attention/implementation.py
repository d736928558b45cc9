"""Plain attention with weights: the readable reference of the softmax operations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.xla._common.dots import DotPolicy
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla._common.plain import Visibility, probabilities, weighted_values
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.attention.softmax import name_output
from ejkernel.types.calls import arguments


class Attention(XlaKernel):
    """Attention and its weights, in O(q * k) memory.

    Differentiable in forward and reverse mode, to any order, in every float array.
    """

    call = calls.Attention
    reads = arguments.ATTENTION | {
        "bias",
        "dropout_rng",
        "dropout_prob",
        "softmax_aux",
        "logits_soft_cap",
        "dtype",
        "softmax_dtype",
        "precision",
    }

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        problem = work.problem
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        dtype = problem.dtype or q.dtype
        if problem.dtype is not None:
            q, k, v = (x.astype(dtype) for x in (q, k, v))
        at_least = problem.softmax_dtype or jnp.float32
        dots = DotPolicy.for_arrays(q, k, v, precision=problem.precision, at_least=at_least)
        (b, q_len, h, _), kv_len = q.shape, k.shape[1]
        visibility = Visibility.from_mask(arrays["mask_info"], q_len, kv_len)
        p = probabilities(
            q,
            k,
            arrays.get("bias"),
            arrays.get("softmax_aux"),
            visibility,
            scale=problem.softmax_scale,
            soft_cap=problem.logits_soft_cap,
            dots=dots,
        )
        drop = problem.dropout_prob
        if drop > 0.0:
            dropout = Dropout.make(arrays["dropout_rng"], b, h, q_len, kv_len)
            p = jnp.where(dropout.keep(drop), p / (1.0 - drop), 0.0)
        o = name_output(weighted_values(p, v, dots, visibility).astype(dtype))
        return (o, p.astype(dtype)), ()


attention = Attention()
