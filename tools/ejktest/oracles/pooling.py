"""Mean pooling in float64, group by group."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def mean_pooling(x, cu_seqlens=None, *, chunk_size=None, attention_mask=None, dout=None):
    """The means, and the gradient of x when ``dout`` is cotangent."""
    x = np.asarray(x).astype(np.float64)
    lead = 2 if cu_seqlens is None else 1
    rows, channels, dx = x.shape[lead - 1], x.shape[lead:], np.zeros_like(x)
    mask = np.ones(x.shape[:lead]) if attention_mask is None else np.asarray(attention_mask)
    sequences = list(zip(x, mask != 0, dx, strict=True))
    if cu_seqlens is not None:
        sequences = [(x[i:j], mask[i:j] != 0, dx[i:j]) for i, j in pairwise(np.asarray(cu_seqlens))]
    size = rows if chunk_size is None else chunk_size
    chunks = 1 if chunk_size is None else -(-rows // size)
    out = np.zeros((len(sequences), chunks, *channels))
    cotangent = out if dout is None else np.asarray(dout).astype(np.float64).reshape(out.shape)
    for m, (values, counts, gradient) in enumerate(sequences):
        for j in range(chunks):
            group = slice(j * size, (j + 1) * size)
            if counts[group].any():
                out[m, j] = values[group][counts[group]].mean(axis=0)
                gradient[group][counts[group]] = cotangent[m, j] / counts[group].sum()
    out = out[:, 0] if chunk_size is None else out
    return out if dout is None else (out, dx)
