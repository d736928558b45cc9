"""The branches under their gates, added, as one differentiable step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes


class _Nothing:
    """Names of what the forward pass keeps: outputs of branches, which have theirs."""

    @staticmethod
    def named(outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        return outputs, saved


class Gated:
    """sum of g * o over the branches, in the dtype that is ``work.problem``.

    ``arrays``: ``o_cmp``, ``o_slc``, ``o_swa [b, s, h, dv]``, those there are, and ``g_cmp``,
    ``g_slc``, ``g_swa`` float32 ``[b, s, h]``; a branch without a gate has 1.
    """

    call = _Nothing
    forward_again = False

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        total = sum(_times(arrays, name, arrays[name]) for name in _branches(arrays))
        return (total.astype(work.problem),), ()

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        names, (do,) = _branches(arrays), cotangents
        parts = [_times(arrays, name, do).astype(arrays[name].dtype) for name in names]
        # XLA makes one kernel of these products and the sums below, which takes twice the time
        *parts, do = lax.optimization_barrier((*parts, do))
        sums = {
            _gate(name): jnp.sum(do.astype(jnp.float32) * arrays[name].astype(jnp.float32), -1)
            for name in names
            if _gate(name) in arrays
        }
        return dict(zip(names, parts, strict=True)) | sums


def _branches(arrays: Arrays) -> tuple[str, ...]:
    return tuple(name for name in arrays if name.startswith("o_"))


def _gate(name: str) -> str:
    return name.replace("o_", "g_", 1)


def _times(arrays: Arrays, name: str, x: jax.Array) -> jax.Array:
    """``x`` in float32 under the gate of a branch."""
    gate = arrays.get(_gate(name))
    x = x.astype(jnp.float32)
    return x if gate is None else gate[..., None] * x


gated = Gated()


def add(work: Work, branches: Arrays, dtype: Any) -> jax.Array:
    """The output of the operation whose ``work`` it is; ``branches`` as ``Gated`` wants them."""
    work = Work(gated, jnp.dtype(dtype), None, work.target, work.operation)
    return differentiable(work, same_axes(branches))[0]
