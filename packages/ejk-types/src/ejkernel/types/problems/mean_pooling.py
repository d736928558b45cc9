"""Static properties of mean pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax.numpy as jnp


@dataclass(frozen=True)
class PoolingProblem:
    """Sizes, dtype and options of ``batch`` calls of the same shape.

    Attributes:
        rows, channels: sizes of x ``[batch, rows, channels]``.
        chunk: rows of a group, at most ``rows``.
        sequences: packed sequences of a call; 0: the rows are one sequence.
        masked: whether rows may be left out.
        dtype: dtype of x and of the means.
    """

    batch: int
    rows: int
    channels: int
    chunk: int
    sequences: int
    masked: bool
    dtype: str

    @classmethod
    def from_call(cls, a: Mapping[str, Any]) -> Self:
        """Returns the problem of a call whose arguments are canonical."""
        x, cu = a["x"], a["cu_seqlens"]
        batch, rows, *channels = x.shape if cu is None else (1, *x.shape)
        return cls(
            batch=batch,
            rows=rows,
            channels=math.prod(channels),
            chunk=a["chunk_size"] or max(rows, 1),
            sequences=0 if cu is None else cu.shape[0] - 1,
            masked=a["attention_mask"] is not None,
            dtype=jnp.dtype(x.dtype).name,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element of x."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def per_sequence(self) -> int:
        """Groups of a sequence."""
        return -(-self.rows // self.chunk)

    @property
    def groups(self) -> int:
        """Groups of one call."""
        return max(self.sequences, 1) * self.per_sequence

    def folded(self, size: int) -> Self:
        """Returns the problem of ``size`` times as many calls."""
        return replace(self, batch=size * self.batch)
