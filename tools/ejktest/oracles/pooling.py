"""Mean pooling in float64, group by group."""

from __future__ import annotations

import numpy as np


def groups(shape, cu_seqlens=None, chunk_size=None):
    """Index tuples of the output with the index tuples of the rows they average."""
    if cu_seqlens is None:
        b, s = shape
        runs = [((i,), (i,), 0, s) for i in range(b)]
    else:
        cu = np.asarray(cu_seqlens)
        s = shape[0]
        runs = [((m,), (), cu[m], cu[m + 1]) for m in range(len(cu) - 1)]
    for out, row, start, stop in runs:
        if chunk_size is None:
            yield out, (*row, np.arange(start, stop))
        else:
            for j in range(-(-s // chunk_size)):
                first = min(start + j * chunk_size, stop)
                yield (*out, j), (*row, np.arange(first, min(first + chunk_size, stop)))


def mean_pooling(x, cu_seqlens=None, *, chunk_size=None, attention_mask=None, dout=None):
    """The means, and the gradient of x when ``dout`` is given."""
    x = np.asarray(x).astype(np.float64)
    lead = 1 if cu_seqlens is not None else 2
    kept = np.ones(x.shape[:lead], bool)
    if attention_mask is not None:
        kept = np.asarray(attention_mask) != 0
    found = list(groups(x.shape[:lead], cu_seqlens, chunk_size))
    n = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    form = (n,) if chunk_size is None else (n, -(-x.shape[lead - 1] // chunk_size))
    out, dx = np.zeros((*form, *x.shape[lead:])), np.zeros_like(x)
    for where, rows in found:
        *row, tokens = rows
        tokens = tokens[kept[rows]]
        if len(tokens):
            out[where] = x[(*row, tokens)].mean(axis=0)
            if dout is not None:
                dx[(*row, tokens)] = np.asarray(dout[where]).astype(np.float64) / len(tokens)
    return out if dout is None else (out, dx)
