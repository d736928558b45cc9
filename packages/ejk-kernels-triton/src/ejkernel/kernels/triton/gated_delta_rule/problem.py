"""The static properties of a call of the gated delta rule, hashable: they key programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.kernel import unsupported
from ejkernel.types.arrays import result_dtype

MAX_DIM = 128
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Problem:
    """Sizes and dtypes of ``batch`` rows, and their options.

    Attributes:
        rows: tokens of a batch row, of all its packed sequences.
        heads: value heads, which have a state each.
        kv_heads: heads of queries and keys.
        dim, value_dim: channels of a key and of a value.
        sequences: packed sequences per batch row; 0: a batch row is one sequence.
        scale: factor of the query.
        channel_gates: whether gates are given per key channel; queries and keys then have as many
            heads as values.
        normalize: whether queries and keys are divided by their lengths.
        reverse: whether time runs from the last token to the first.
        dtype: of query, key and value together.
        out: dtype of the output.
        narrowest: the narrowest dtype of query, key and value.
        unsupported: reason against the call, or "".
    """

    batch: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    sequences: int
    scale: float
    channel_gates: bool
    normalize: bool
    reverse: bool
    dtype: str
    out: str
    narrowest: str
    unsupported: str = ""

    @property
    def states(self) -> int:
        """Number of states of a batch row."""
        return max(self.sequences, 1)

    @property
    def compute_dtype(self) -> str:
        """Dtype of the operands of matmuls.

        States leave the range of float16. TF32 has all digits of float16 and keeps the range.
        """
        return "bfloat16" if self.dtype == "bfloat16" else "float32"

    @property
    def precision(self) -> str:
        """Precision of float32 matmuls on NVIDIA GPUs.

        A float32 key rounded to TF32 has another length: with beta 2 the state would grow.
        """
        return "tf32" if self.dtype == "float16" else "tf32x3"

    def folded(self, size: int) -> Problem:
        """Returns the problem of ``size`` times as many batch rows."""
        return replace(self, batch=size * self.batch)


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    q, v, cu = a["query"], a["value"], a["cu_seqlens"]
    names = ("query", "key", "value", "g", "beta", "initial_state")
    dtypes = {name: jnp.dtype(a[name].dtype).name for name in names if a[name] is not None}
    reason = unsupported(dtypes, {})
    for name, dim in (("query", q.shape[3]), ("value", v.shape[3])):
        if dim > MAX_DIM:
            reason = reason or f"{name}: head dim {dim} is more than {MAX_DIM}"
    channel_gates = a["g"] is not None and a["g"].ndim == 4
    wide = [dtypes[name] for name in names[:3]]
    return Problem(
        batch=q.shape[0],
        rows=q.shape[1],
        heads=v.shape[2],
        kv_heads=v.shape[2] if channel_gates else q.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        sequences=0 if cu is None else cu.shape[0] - 1,
        scale=a["softmax_scale"],
        channel_gates=channel_gates,
        normalize=a["normalize_qk"],
        reverse=a["reverse"],
        dtype=wide[0] if len(set(wide)) == 1 else result_dtype(*wide).name,
        out=wide[0],
        narrowest=min(wide, key=lambda dtype: jnp.dtype(dtype).itemsize),
        unsupported=reason or "",
    )
