"""Linear attention: the recurrence for a few tokens, chunks for the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._linear.core import chunked
from ejkernel.kernels.xla._linear.inputs import Canonical, Gates, canonicalise
from ejkernel.kernels.xla._linear.layout import Plain, packed
from ejkernel.kernels.xla._linear.step import stepwise
from ejkernel.kernels.xla._linear.tiles import STEP_LIMIT, chunk_length


def _in_chunks(call: Canonical, chunk: int, reverse: bool) -> tuple[jax.Array, jax.Array]:
    length = call.rows.q.shape[1]
    if call.cu_seqlens is None:
        layout = Plain(length, chunk, reverse)
    else:
        layout = packed(call.cu_seqlens, length, chunk, reverse)
    rows = jax.tree.map(layout.split, call.rows)
    o, ends = chunked(rows, layout.initial(call.table), layout.links())
    return layout.merge(o), layout.final(ends, call.table)


def linear_attention(
    query: Any,
    key: Any,
    value: Any,
    gates: Gates,
    initial_state: Any,
    cu_seqlens: Any,
    *,
    softmax_scale: Any,
    reverse: bool,
    return_state: bool,
    cfg: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The recurrence of this package's docstring; arguments as ``recurrent_attention``."""
    call = canonicalise(query, key, value, gates, initial_state, cu_seqlens, softmax_scale)
    b, s, h, _ = call.rows.q.shape
    sequences = call.table.shape[0]
    if 0 in (b, s, h, sequences):
        o, state = jnp.zeros((b, s, h, call.rows.v.shape[3]), call.dtype), call.table
    elif s < STEP_LIMIT:
        o, state = stepwise(call.rows, call.table, call.cu_seqlens, reverse)
    else:
        per_batch = sequences if call.cu_seqlens is not None else 1
        o, state = _in_chunks(call, chunk_length(s, per_batch, cfg), reverse)
    o = o.astype(call.dtype)
    return (o, state) if return_state else o
