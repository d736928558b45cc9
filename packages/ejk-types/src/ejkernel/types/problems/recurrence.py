"""Static properties of recurrences over tokens: linear attention and the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype


@dataclass(frozen=True)
class RecurrentProblem:
    """Sizes, dtypes and options of ``batch`` rows of the same shape.

    Attributes:
        rows: tokens of a batch row, packed sequences together.
        heads, kv_heads: heads of the states, and heads that several of them share.
        dim, value_dim: channels of a key and of a value.
        sequences: packed sequences of a batch row; 0: the rows are one sequence.
        scale: factor of the query.
        reverse: whether time runs from the last token to the first.
        dtype: promoted dtype of query, key and value.
        out: dtype of the output.
        narrowest: narrowest dtype of query, key and value.
        unsupported: reason why no kernel of the backend takes the call, or "".
    """

    batch: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    sequences: int
    scale: float
    reverse: bool
    dtype: str
    out: str
    narrowest: str
    unsupported: str = field(default="", kw_only=True)

    @classmethod
    def from_call(cls, a: Mapping[str, Any], **others: Any) -> Self:
        """Returns the problem of a call whose arguments are canonical.

        ``others``: the properties of a subclass, and ``unsupported``.
        """
        q, k, v, cu = a["query"], a["key"], a["value"], a["cu_seqlens"]
        dtypes = [jnp.dtype(x.dtype) for x in (q, k, v)]
        return cls(
            batch=q.shape[0],
            rows=q.shape[1],
            heads=max(q.shape[2], v.shape[2]),  # groups of query heads, or of value heads
            kv_heads=k.shape[2],
            dim=q.shape[3],
            value_dim=v.shape[3],
            sequences=0 if cu is None else cu.shape[0] - 1,
            scale=a["softmax_scale"],
            reverse=a["reverse"],
            dtype=dtypes[0].name if len(set(dtypes)) == 1 else result_dtype(*dtypes).name,
            out=dtypes[0].name,
            narrowest=min(dtypes, key=lambda dtype: dtype.itemsize).name,
            **others,
        )

    @property
    def states(self) -> int:
        """Initial and final states of a head in a batch row."""
        return max(self.sequences, 1)

    @property
    def compute_dtype(self) -> str:
        """Dtype of the operands of matmuls on a GPU.

        States, and scores without a softmax, leave the range of float16. TF32 has all digits of
        float16 and keeps the range.
        """
        return "bfloat16" if self.dtype == "bfloat16" else "float32"

    def folded(self, size: int) -> Self:
        """Returns the problem of ``size`` times as many batch rows."""
        return replace(self, batch=size * self.batch)
