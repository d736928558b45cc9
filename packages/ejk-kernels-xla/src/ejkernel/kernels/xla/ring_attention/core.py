"""The differentiable core: blockwise attention per step, joined over the ring.

    forward   output and normaliser of the visiting keys are merged into the running pair, in the
              accumulation dtype; sinks are counted once, at the end.
    backward  dq stays; k and v travel again, and with them the sums dk and dv, one step behind,
              which end with the device that owns the keys. Every part uses the normaliser of the
              whole row, so the gradients of the parts add up.

The next keys are sent for before the current ones are used, so that communication can overlap
with computation. Keys that no query here sees cost no product: their range of blocks is empty.

Memory is O(local q_len + kv_len) besides the caller's bias and its gradient. With zigzag order and
a causal mask every device has the same work; the blocks are fitted to the two chunks so that
those after the diagonal are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common import blockwise
from ejkernel.kernels.xla._common import softmax as sm
from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.compiled import compiled
from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla.ring_attention import masks
from ejkernel.kernels.xla.ring_attention.masks import Parts
from ejkernel.kernels.xla.ring_attention.ring import Ring, Schedule, walk
from ejkernel.ops.varying import vary, vary_alike, varying_axes
from ejkernel.types.softmax import named


@dataclass(frozen=True)
class Plan:
    """What is static in one call."""

    ring: Ring
    schedule: Schedule
    fwd: Spec
    bwd: Spec


class _Step:
    """One step's inputs to the blockwise passes: mask, bias columns and dropout of the visitors."""

    def __init__(self, plan: Plan, spec: Spec, q: Any, k: Any, parts: Parts, seed: Any):
        self.ring, self.schedule, self.spec, self.parts = plan.ring, plan.schedule, spec, parts
        self.seed, self.shape = seed, (*q.shape[:3:2], q.shape[1], k.shape[1])
        self.layout = spec.layout(q, k)

    def __call__(self, step: Any, visiting: tuple, bias: jax.Array | None) -> dict[str, Any]:
        """Keyword arguments, and the device that owns the keys."""
        batch, heads, q_len, kv_len = self.shape
        source = self.schedule.source(self.ring, step)
        blocks = {"block_q": self.layout.block_q, "block_kv": self.layout.block_kv}
        mask = masks.visible(
            self.ring, self.parts, visiting, source, q_len=q_len, kv_len=kv_len, **blocks
        )
        dropout = None
        if self.spec.dropout_prob > 0.0:
            dropout = Dropout.make(
                self.seed,
                batch,
                heads,
                q_len,
                kv_len,
                q_index=self.ring.index(self.ring.here(), q_len),
                kv_index=self.ring.index(source, kv_len),
            )
        if bias is not None:
            bias = masks.columns(bias, source, kv_len)
        return {"bias": bias, "mask": mask, "dropout": dropout, "source": source}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q, k, v, bias, sinks, parts, seed):
    (o, lse), _ = _attend_fwd(plan, q, k, v, bias, sinks, parts, seed)
    return o, lse


def _attend_fwd(plan: Plan, q, k, v, bias, sinks, parts, seed):
    ring = plan.ring
    inputs = _Step(plan, plan.fwd, q, k, parts, seed)
    unit = plan.fwd.unit(bias)

    def step(t: Any, state: Any, first: bool, last: bool) -> Any:
        so_far, visitors = state
        coming = visitors if last else ring.shift(visitors, 1)
        k, v, visiting = visitors
        given = inputs(t, visiting, bias)
        del given["source"]
        return sm.merge(so_far, blockwise.forward(plan.fwd, q, k, v, **given), unit), coming

    acc = accumulation_dtype(q, k, v, at_least=plan.fwd.logits_dtype)
    axes = varying_axes(q)
    o = vary(jnp.zeros((*q.shape[:3], v.shape[-1]), acc), axes)
    zero = vary(jnp.zeros(q.shape[:3], acc), axes)
    visitors = ring.shift((k, v, masks.travelling(parts)), plan.schedule.start)
    state = ((o, sm.Rows(zero - jnp.inf, zero)), visitors)
    (o, rows), _ = walk(plan.schedule.count, step, state)
    o, lse, shares = sm.settle(o, rows, sinks, unit)
    o, lse, shares = named(o.astype(q.dtype), lse, shares)
    return (o, lse), (q, k, v, bias, sinks, parts, seed, o, shares)


def _attend_bwd(plan: Plan, residuals, cotangents):
    q, k, v, bias, sinks, parts, seed, o, shares = residuals
    do, dlse = cotangents
    ring, schedule = plan.ring, plan.schedule
    delta = blockwise.row_delta(o, do, dlse, shares.m.dtype)
    inputs = _Step(plan, plan.bwd, q, k, parts, seed)

    def step(t: Any, state: Any, first: bool, last: bool) -> Any:
        dq, dbias, sums, visitors = state
        coming = visitors if last else ring.shift(visitors, 1)
        dk, dv = sums if first else ring.shift(sums, 1)
        k, v, visiting = visitors
        given = inputs(t, visiting, bias)
        source = given.pop("source")
        part = blockwise.backward(plan.bwd, q, k, v, shares=shares, delta=delta, do=do, **given)
        if dbias is not None and part.dbias is not None:  # every step owns other columns
            start = source * k.shape[1]
            dbias = jax.lax.dynamic_update_slice_in_dim(dbias, part.dbias, start, 3)
        return dq + part.dq, dbias, (dk + part.dk, dv + part.dv), coming

    axes = varying_axes(q)
    dq, dk, dv, dbias = (
        None if x is None else vary(jnp.zeros(x.shape, shares.m.dtype), axes)
        for x in (q, k, v, bias)
    )
    visitors = ring.shift((k, v, masks.travelling(parts)), schedule.start)
    state = (dq, dbias, (dk, dv), visitors)
    dq, dbias, sums, _ = walk(schedule.count, step, state, first_differs=True)
    dk, dv = ring.shift(sums, -(schedule.start + schedule.count - 1))
    return (
        dq.astype(q.dtype),
        dk.astype(k.dtype),
        dv.astype(v.dtype),
        None if dbias is None else dbias.astype(bias.dtype),
        sm.sink_gradient(sinks, shares, delta),
        None,
        None,
    )


_attend.defvjp(_attend_fwd, _attend_bwd)
_compiled = compiled(_attend, static=1)


def attend(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    parts: Parts,
    seed: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """o ``[b, q, h, dv]`` in the query dtype and the natural lse ``[b, q, h]``, differentiable.

    All arrays are this device's shards; ``bias`` has the keys of all devices.
    """
    arrays: Any = (q, k, v, bias, sinks, parts, seed)
    return _compiled(plan, *vary_alike(arrays, varying_axes(plan.ring.here())))
