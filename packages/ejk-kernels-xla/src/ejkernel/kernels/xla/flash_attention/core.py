"""The differentiable core: one custom_vjp over the blockwise passes.

Residuals are q, k, v, o, two numbers a row for its probabilities (``softmax.Shares``) and what the
caller gave (mask, bias, sinks, seed).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from ejkernel.kernels.xla._common import blockwise
from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.compiled import compiled
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla._common.softmax import settle, sink_gradient
from ejkernel.ops.varying import vary_alike
from ejkernel.types import MaskInfo, prepare_mask
from ejkernel.types.softmax import named


def _prepare(spec: Spec, q: jax.Array, k: jax.Array, mask: MaskInfo, seed: jax.Array | None):
    layout = spec.layout(q, k)
    tiles = prepare_mask(
        mask,
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        block_q=layout.block_q,
        block_kv=layout.block_kv,
    )
    dropout = None
    if spec.dropout_prob > 0.0:
        dropout = Dropout.make(seed, layout.batch, q.shape[2], layout.q_len, layout.kv_len)
    return tiles, dropout


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(fwd: Spec, bwd: Spec, q, k, v, bias, sinks, mask, seed):
    (o, lse), _ = _attend_fwd(fwd, bwd, q, k, v, bias, sinks, mask, seed)
    return o, lse


def _attend_fwd(fwd: Spec, bwd: Spec, q, k, v, bias, sinks, mask, seed):
    tiles, dropout = _prepare(fwd, q, k, mask, seed)
    o, rows = blockwise.forward(fwd, q, k, v, bias, mask=tiles, dropout=dropout)
    o, lse, shares = settle(o, rows, sinks, fwd.unit(bias))
    o, lse, shares = named(o.astype(q.dtype), lse, shares)
    return (o, lse), (q, k, v, bias, sinks, mask, seed, o, shares)


def _attend_bwd(fwd: Spec, bwd: Spec, residuals, cotangents):
    q, k, v, bias, sinks, mask, seed, o, shares = residuals
    do, dlse = cotangents
    tiles, dropout = _prepare(bwd, q, k, mask, seed)
    delta = blockwise.row_delta(o, do, dlse, shares.m.dtype)
    grads = blockwise.backward(
        bwd, q, k, v, bias, mask=tiles, dropout=dropout, shares=shares, delta=delta, do=do
    )
    dbias = None if bias is None or grads.dbias is None else grads.dbias.astype(bias.dtype)
    return (
        grads.dq.astype(q.dtype),
        grads.dk.astype(k.dtype),
        grads.dv.astype(v.dtype),
        dbias,
        sink_gradient(sinks, shares, delta),
        None,
        None,
    )


_attend.defvjp(_attend_fwd, _attend_bwd)
_compiled = compiled(_attend, static=2)


def attend(
    fwd: Spec,
    bwd: Spec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    mask: MaskInfo,
    seed: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """o ``[b, q, h, dv]`` in the query dtype and the natural lse ``[b, q, h]``, differentiable.

    ``fwd`` and ``bwd`` differ in their blocks only. ``seed`` is what ``seed_words`` returns, None
    without dropout.
    """
    arrays: Any = (q, k, v, bias, sinks, mask, seed)
    return _compiled(fwd, bwd, *vary_alike(arrays))
