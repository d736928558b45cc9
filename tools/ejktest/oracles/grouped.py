"""Grouped matmul in float64, group by group, with its gradients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    """The output [m, n] and, with ``dout``, the gradients of lhs and rhs."""

    out: np.ndarray
    dlhs: np.ndarray | None
    drhs: np.ndarray | None


def grouped_matmul(
    lhs,
    rhs,
    group_sizes,
    group_offset=None,
    existing_out=None,
    *,
    transpose_rhs=False,
    rhs_scale=None,
    dout=None,
) -> Result:
    lhs, rhs = np.asarray(lhs).astype(np.float64), np.asarray(rhs).astype(np.float64)
    matrices = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    if rhs_scale is not None:
        scale = np.asarray(rhs_scale).astype(np.float64)
        matrices = matrices * (scale if scale.ndim == 0 else scale.reshape(len(scale), 1, -1))
    m, first = lhs.shape[0], 0 if group_offset is None else int(np.reshape(group_offset, ()))
    out = np.zeros((m, matrices.shape[2]))
    dlhs, dmatrices = np.zeros_like(lhs), np.zeros_like(matrices)
    start = 0
    for i, size in enumerate(np.asarray(group_sizes)):
        stop = min(start + int(size), m)
        local = i - first
        if 0 <= local < len(matrices):
            out[start:stop] = lhs[start:stop] @ matrices[local]
            if dout is not None:
                d = np.asarray(dout)[start:stop].astype(np.float64)
                dlhs[start:stop] = d @ matrices[local].T
                dmatrices[local] = lhs[start:stop].T @ d
        start = stop
    if existing_out is not None:
        out = out + np.asarray(existing_out).astype(np.float64)
    if dout is None:
        return Result(out, None, None)
    return Result(out, dlhs, dmatrices.swapaxes(1, 2) if transpose_rhs else dmatrices)
