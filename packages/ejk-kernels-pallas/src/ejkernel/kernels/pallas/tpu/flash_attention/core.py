"""The differentiable core: three kernels joined by one custom_vjp.

Residuals are q, k, v, o, the lse of every row and what the caller gave; the [q, k] matrix is
recomputed tile by tile. The kernels read head-major arrays padded to whole tiles: one transpose
and pad that XLA fuses into what produced the array.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.masks import tile_rules, visits
from ejkernel.kernels.pallas.tpu.flash_attention.dkv import key_gradients
from ejkernel.kernels.pallas.tpu.flash_attention.dq import query_gradient
from ejkernel.kernels.pallas.tpu.flash_attention.forward import forward
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout, layout_of, padded
from ejkernel.kernels.pallas.tpu.flash_attention.tiles import Tiles
from ejkernel.ops.varying import vary_alike
from ejkernel.types import MaskInfo, softmax
from ejkernel.types.problem import Problem


@dataclass(frozen=True)
class Static:
    """Everything about a call that is known while tracing."""

    problem: Problem
    chip: Chip
    fwd: Tiles
    dq: Tiles
    dkv: Tiles


def _prepare(
    static: Static, tiles: Tiles, mask: MaskInfo, transposed: bool = False
) -> tuple[Layout, Any, list[tuple[jax.Array, jax.Array]]]:
    """Layout, table of visited blocks and padded value pairs ``[#b, 1, tokens]`` of a kernel."""
    p = static.problem
    rules, pairs = tile_rules(mask, p.q_len, p.kv_len)
    found = visits(mask, rules, tiles.block_q, tiles.block_kv, transposed)
    layout = layout_of(p, tiles, rules, static.chip, found)
    rows = [
        (padded(q[:, None], layout.q_padded), padded(kv[:, None], layout.kv_padded))
        for q, kv in pairs.values()
    ]
    return layout, found.table, rows


def _head_major(x: jax.Array, length: int, dim: int) -> jax.Array:
    return padded(x.swapaxes(1, 2), length, dim)


def _natural(x: jax.Array, length: int, dim: int) -> jax.Array:
    return x[:, :, :length, :dim].swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q, k, v, sink, mask):
    return _attend_fwd(static, q, k, v, sink, mask)[0]


def _attend_fwd(static: Static, q, k, v, sink, mask):
    p = static.problem
    layout, table, pairs = _prepare(static, static.fwd, mask)
    o, lse, base = forward(
        layout,
        table,
        _head_major(q, layout.q_padded, layout.dim),
        _head_major(k, layout.kv_padded, layout.dim),
        _head_major(v, layout.kv_padded, layout.value_dim),
        sink,
        pairs,
    )
    o = _natural(o, p.q_len, p.value_dim)
    lse, base = (x[:, :, 0, : p.q_len] for x in (lse, base))
    o, lse, base = softmax.named(o, lse, base)
    return (o, lse), (q, k, v, sink, mask, o, lse, base)


def _attend_bwd(static: Static, residuals, cotangents):
    q, k, v, sink, mask, o, lse, base = residuals
    do, dlse = cotangents
    p = static.problem
    delta = softmax.row_delta(o, do, dlse)

    def operands(layout: Layout) -> tuple[jax.Array, ...]:
        return (
            _head_major(q, layout.q_padded, layout.dim),
            _head_major(k, layout.kv_padded, layout.dim),
            _head_major(v, layout.kv_padded, layout.value_dim),
            _head_major(do, layout.q_padded, layout.value_dim),
            padded(base[:, :, None], layout.q_padded),
            padded(delta[:, :, None], layout.q_padded),
        )

    layout, table, pairs = _prepare(static, static.dq, mask)
    dq = query_gradient(layout, table, *operands(layout), pairs)
    layout, table, pairs = _prepare(static, static.dkv, mask, transposed=True)
    dk, dv = key_gradients(layout, table, *operands(layout), pairs)
    return (
        _natural(dq, p.q_len, p.dim),
        _natural(dk, p.kv_len, p.dim),
        _natural(dv, p.kv_len, p.value_dim),
        softmax.sink_gradient(sink, lse, delta),
        None,
    )


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sink: jax.Array | None,
    mask: MaskInfo,
) -> tuple[jax.Array, jax.Array]:
    """o ``[b, q, h, dv]`` and the natural lse float32 ``[b, h, q]``, differentiable.

    q, k, v have the dtype of ``static.problem``; sink is float32 ``[1, h]`` (one logit per head).
    """
    arrays: Any = (q, k, v, sink, mask)
    return _attend(static, *vary_alike(arrays))
