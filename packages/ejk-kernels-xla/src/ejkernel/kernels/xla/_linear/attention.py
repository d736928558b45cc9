"""Linear attention: the recurrence for a few tokens, chunks for the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._linear.chunk import Rows
from ejkernel.kernels.xla._linear.core import chunked
from ejkernel.kernels.xla._linear.inputs import Gates, canonicalise
from ejkernel.kernels.xla._linear.layout import Plain, packed
from ejkernel.kernels.xla._linear.step import stepwise
from ejkernel.kernels.xla._linear.tiles import STEP_LIMIT, chunk_length
from ejkernel.types.softmax import named_out


@partial(jax.jit, static_argnames=("chunk", "reverse"))
def _in_chunks(
    rows: Rows, table: jax.Array, cu_seqlens: jax.Array | None, *, chunk: int, reverse: bool
) -> tuple[jax.Array, jax.Array]:
    length = rows.q.shape[1]
    if cu_seqlens is None:
        layout = Plain(length, chunk, reverse)
    else:
        layout = packed(cu_seqlens, length, chunk, reverse)
    rows = jax.tree.map(layout.split, rows)
    o, ends = chunked(rows, layout.initial(table), layout.links())
    return layout.merge(o), layout.final(ends, table)


_in_steps = jax.jit(stepwise, static_argnames="reverse")


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
    (b, s, h, dk), dv = call.rows.q.shape, call.rows.v.shape[3]
    arrays, sequences = (call.rows, call.table, call.cu_seqlens), call.table.shape[0]
    if 0 in (b, s, h, dk, dv, sequences):
        o, state = jnp.zeros((b, s, h, dv), call.dtype), call.table
    elif s < STEP_LIMIT:
        o, state = _in_steps(*arrays, reverse=reverse)
    else:
        per_batch = sequences if call.cu_seqlens is not None else 1
        chunk = chunk_length(s, per_batch, cfg)
        o, state = _in_chunks(*arrays, chunk=chunk, reverse=reverse)
    o = named_out(o.astype(call.dtype))
    return (o, state) if return_state else o
