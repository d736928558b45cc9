"""Mean pooling on TPU as one kernel object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.common.segments import packed_bounds, visits
from ejkernel.kernels.pallas.tpu.mean_pooling import tiles
from ejkernel.kernels.pallas.tpu.mean_pooling.chunks import pool_chunks
from ejkernel.kernels.pallas.tpu.mean_pooling.chunks_gradient import chunks_gradient
from ejkernel.kernels.pallas.tpu.mean_pooling.segments import pool_segments
from ejkernel.kernels.pallas.tpu.mean_pooling.segments_gradient import segments_gradient
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.problems.mean_pooling import PoolingProblem

DTYPES = ("bfloat16", "float32")


class MeanPooling(PallasKernel):
    """Means of sequences, of their chunks, or of packed sequences, on a TPU.

    bfloat16 and float32, accumulated in float32. Chunks of packed sequences are not supported. Two
    calls give the same bits. Differentiable once. No config names tiles.
    """

    call = calls.MeanPooling
    reads = frozenset({"x", "cu_seqlens", "chunk_size", "attention_mask"})
    fixed_tiles = True
    chip = staticmethod(current_chip)
    problem = staticmethod(PoolingProblem.from_call)
    choose = staticmethod(tiles.choose)

    def variant_reason(self, problem: PoolingProblem) -> str | None:
        if self.choose(problem, self.target()).groups:
            return None  # a block has whole chunks of one batch row
        return "x: not batch-invariant where blocks of rows begin in another batch row"

    def unsupported_reason(self, problem: PoolingProblem, target: Chip) -> str | None:
        if problem.dtype not in DTYPES:
            return f"x: {problem.dtype} is not supported, only {' and '.join(DTYPES)}"
        if problem.sequences and problem.per_sequence > 1:
            return "chunk_size: chunks of packed sequences are not supported"
        return None

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, x = work.problem, work.tiles, arrays["x"]
        if t.groups:
            means = pool_chunks(p, t, work.target, x, arrays.get("kept"))
            return (means.reshape(-1, p.channels),), ()
        bounds, counts, row_mask = _segments(p, arrays)
        schedule = visits(bounds, p.batch * p.rows, t.rows, empty_segments=True)
        flat = x.reshape(-1, p.channels)
        return (pool_segments(p, t, work.target, flat, schedule, counts, row_mask),), ()

    def backward(
        self, work: Work, arrays: Arrays, outputs: Any, saved: Any, cotangents: Any
    ) -> Mapping[str, Any]:
        p, t, (dout,) = work.problem, work.tiles, cotangents
        if t.groups:
            dout = dout.reshape(p.batch, p.groups, p.channels)
            return {"x": chunks_gradient(p, t, work.target, dout, arrays.get("kept"))}
        bounds, counts, row_mask = _segments(p, arrays)
        rows = p.batch * p.rows
        schedule = visits(jnp.append(bounds, rows), rows, t.rows)
        dx = segments_gradient(p, t, work.target, dout, schedule, counts, row_mask)
        return {"x": dx.reshape(arrays["x"].shape)}


def _segments(p: PoolingProblem, arrays: Arrays) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the bounds of all groups in the rows of the flattened x, how many rows of each count,
    and int8 ``[1, rows]``, which of them do."""
    total, row_mask = p.batch * p.rows, arrays.get("kept")
    if p.sequences:
        bounds = packed_bounds(arrays["cu_seqlens"], total)
    else:
        starts = np.minimum(np.arange(p.groups) * p.chunk, p.rows)
        first = np.arange(p.batch)[:, None] * p.rows + starts
        bounds = jnp.asarray(np.append(first, total), jnp.int32)
    if row_mask is None:
        return bounds, jnp.diff(bounds), None
    row_mask = row_mask.reshape(1, total)
    before = jnp.pad(jnp.cumsum(row_mask[0].astype(jnp.int32)), (1, 0))
    return bounds, jnp.diff(before[bounds]), row_mask


mean_pooling = MeanPooling()
