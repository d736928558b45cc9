"""Static properties of a grouped matmul."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax.numpy as jnp

from ejkernel.types.arrays import is_eight_bit, result_dtype


@dataclass(frozen=True)
class GroupedProblem:
    """Sizes, dtypes and options of ``batch`` grouped matmuls of the same shape.

    Attributes:
        rows: rows of ``lhs [batch * rows, inner]`` in one call.
        inner: length of the contracted axis.
        columns: columns of the result.
        held: number of matrices of one call.
        groups: group sizes of one call; more than ``held`` with a group offset.
        transposed: whether matrices are ``[columns, inner]``.
        dtype: dtype of both operands of the matmul.
        out: dtype of the result.
        precision: precision of float32 matmuls, as the backend names it.
        batch: number of calls.
        shared: whether all calls have the same matrices.
        added: whether ``existing_out`` is added to the result.
        stored: the 8-bit dtype of the matrices, "" where it is ``dtype``.
    """

    rows: int
    inner: int
    columns: int
    held: int
    groups: int
    transposed: bool
    dtype: str
    out: str
    precision: str
    batch: int = 1
    shared: bool = True
    added: bool = False
    stored: str = ""

    @classmethod
    def from_call(cls, a: Mapping[str, Any], precision: str) -> Self:
        """Returns the problem of a call whose arguments are canonical."""
        lhs, rhs = a["lhs"], a["rhs"]
        transposed = bool(a.get("transpose_rhs"))
        dtype = result_dtype(lhs.dtype, rhs.dtype)
        out = a.get("preferred_element_type")
        return cls(
            rows=lhs.shape[0],
            inner=lhs.shape[1],
            columns=rhs.shape[1 if transposed else 2],
            held=rhs.shape[0],
            groups=a["group_sizes"].shape[0],
            transposed=transposed,
            dtype=dtype.name,
            out=dtype.name if out is None else jnp.dtype(out).name,
            precision=precision,
            stored=jnp.dtype(rhs.dtype).name if is_eight_bit(rhs) else "",
            added=a.get("existing_out") is not None,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element of ``lhs``."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def mean_rows(self) -> int:
        """Mean number of rows in a group."""
        return self.rows // max(self.groups, 1)

    def flipped(self) -> Self:
        """Returns the problem of the gradient of ``lhs``."""
        return replace(
            self,
            inner=self.columns,
            columns=self.inner,
            transposed=not self.transposed,
            out=self.dtype,
            added=False,
        )
