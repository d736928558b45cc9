"""Rows of latent decoding from the partial results of their sequence, in either launch.

    m = max_i m_i,  w_i = l_i exp2(c (m_i - m)),  o = sum_i w_i o_i / sum_i w_i

A warpgroup has a row at a time, or four, and adds its partial results in their order. A load takes
as long as hundreds of additions, so several are in flight before the first addition: two partial
results of four rows, or many of one row where there are as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.types.serving.split import CutSequence, partial_number

F32 = jnp.float32
THREADS = 128  # that share a row
FEW = 2  # partial results whose loads are in flight together, where there are few
ROWS_OF_FEW = 4  # rows whose loads are in flight together, of few partial results


def count_from(start: Any, stride: Any, end: Any) -> Any:
    """Returns the length of ``range(start, end, stride)``."""
    return lax.div(jnp.maximum(end - start, 0) + stride - 1, stride)


def row_layout(d: int) -> Any:
    """Returns the registers of a row of ``d`` columns."""
    return plgpu.Layout.WG_STRIDED((d,), d // THREADS)


@dataclass(frozen=True)
class RowMerge:
    """The rows of one sequence, from its partial results.

    Attributes:
        out: the outputs ``[b, rows, d]``.
        partial_o, m, total: partial results, as ``MLADecodeKernel.outputs`` has them.
        cut: the sequence and its partial results.
        factor: absolute base-2 logit of a dot product of 1.
        many: partial results whose loads are in flight together, of a sequence with as many.
    """

    out: Any
    partial_o: Any
    m: Any
    total: Any
    cut: CutSequence
    factor: Any
    many: int

    def merge(self, groups: Callable[[int], tuple[Any, Any, Any]]) -> None:
        """Writes the rows of some groups, each of one row or of ``ROWS_OF_FEW``.

        ``groups``: from the rows of a group, (first, stride, end) of the groups' numbers.
        """

        def merge_groups(together: int, row_count: int) -> None:
            start, stride, end = groups(row_count)

            def merge_group(i: Any, carry: Any) -> Any:
                row = (start + i * stride) * row_count
                self._add_partials(together, [row + n for n in range(row_count)])
                return carry

            lax.fori_loop(0, count_from(start, stride, end), merge_group, jnp.int32(0))

        partials = self.cut.partials
        has_few = (partials > 0) & (partials < self.many)
        pl.when(has_few)(lambda: merge_groups(FEW, ROWS_OF_FEW))
        pl.when(partials >= self.many)(lambda: merge_groups(self.many, 1))

    def _add_partials(self, together: int, rows: list) -> None:
        cut, d = self.cut, self.out.shape[-1]

        def add_some(i: Any, carry: Any) -> Any:
            numbers = [i * together + n for n in range(together)]
            partials = [
                (partial_number(cut.first_partial, jnp.minimum(n, cut.partials - 1)),
                 n < cut.partials)
                for n in numbers
            ]  # fmt: skip
            # all loads before the first use of any
            loaded = [
                [
                    (
                        self.m[partial, row],
                        self.total[partial, row],
                        self.partial_o[partial, row, :],
                    )
                    for partial, _ in partials
                ]
                for row in rows
            ]
            exists = [inside for _, inside in partials]
            return [self._add(*x, exists) for x in zip(carry, loaded, strict=True)]

        zeros = plgpu.layout_cast(jnp.zeros((d,), F32), row_layout(d))
        carry = [(jnp.float32(-jnp.inf), jnp.float32(0.0), zeros) for _ in rows]
        rounds = lax.div(cut.partials + (together - 1), together)
        carry = lax.fori_loop(0, rounds, add_some, carry)
        for row, (_, norm, acc) in zip(rows, carry, strict=True):
            acc = acc / jnp.where(norm == 0.0, 1.0, norm)
            self.out[cut.sequence, row, :] = acc.astype(self.out.dtype)

    def _add(self, state: Any, loaded: list, exists: list) -> Any:
        before, norm, acc = state
        top = before
        for high, _, _ in loaded:  # beyond the last it is the last once more
            top = jnp.maximum(top, high)
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        alpha = jnp.exp2((before - shift) * self.factor)
        norm, acc = norm * alpha, acc * alpha
        for (high, share, x), inside in zip(loaded, exists, strict=True):
            weight = jnp.where(inside, share * jnp.exp2((high - shift) * self.factor), 0.0)
            norm += weight
            acc += weight * x.astype(F32)
        return top, norm, acc


def write_zeros(out: Any, sequence: Any, first: Any, stride: Any, end: Any) -> None:
    """Writes zeros to the rows ``range(first, end, stride)`` of a sequence."""
    d = out.shape[-1]

    def clear_row(i: Any, carry: Any) -> Any:
        zeros = plgpu.layout_cast(jnp.zeros((d,), out.dtype), row_layout(d))
        out[sequence, first + i * stride, :] = zeros
        return carry

    lax.fori_loop(0, count_from(first, stride, end), clear_row, jnp.int32(0))
