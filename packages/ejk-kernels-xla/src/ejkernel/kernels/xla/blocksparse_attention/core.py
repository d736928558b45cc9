"""The differentiable core: each head walks its own tiles with the blockwise passes.

The work is that of flash attention on the tiles a head visits, 2 products forward and 5 backward
a tile, so it follows the density of the pattern. Where heads are walked several at a time, each by
its own list, the outer tiles of every head are sorted by their number of visits, so that walking
together costs little more than walking alone.

Memory is O(q_len + kv_len) per head, the lists of tiles, and the caller's bias and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common import blockwise
from ejkernel.kernels.xla._common import softmax as sm
from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.compiled import compiled
from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla._common.layout import cdiv, pad_axis
from ejkernel.kernels.xla.blocksparse_attention import tiles
from ejkernel.kernels.xla.blocksparse_attention.heads import Heads
from ejkernel.kernels.xla.blocksparse_attention.pattern import Grid, HeadMask
from ejkernel.ops.varying import vary_alike, zeros
from ejkernel.types.arrays import size_of
from ejkernel.types.prepare import Tiling
from ejkernel.types.softmax import named


@dataclass(frozen=True)
class Plan:
    """What is static in one call: the passes' options and tiles, and the pattern's blocks."""

    fwd: Spec
    bwd: Spec
    q_block: int
    kv_block: int


class _Call(NamedTuple):
    """The arrays of a call."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None
    mask: Any
    pattern: jax.Array | None
    seed: jax.Array | None


class _Walk:
    """Arrays of a call as one head's walk needs them.

    head: those ``[#b, #hk, ...]``; sequences: those ``[b, s, hk, ...]``, padded to whole tiles.
    """

    def __init__(self, plan: Plan, spec: Spec, call: _Call, *, by_key: bool) -> None:
        self.call = call
        (self.batch, self.q_len, h, d), (_, self.kv_len, self.hk, dv) = call.q.shape, call.v.shape
        self.groups = h // self.hk
        tiling = Tiling(self.q_len, self.kv_len, spec.block_q, spec.block_kv)
        grid = Grid(tiling, plan.q_block, plan.kv_block, self.hk, self.groups)
        self.padded_q = cdiv(self.q_len, spec.block_q) * spec.block_q
        self.padded_kv = cdiv(self.kv_len, spec.block_kv) * spec.block_kv
        self.sequences = {
            "q": self.rows(call.q),
            "k": pad_axis(call.k, 1, self.padded_kv),
            "v": pad_axis(call.v, 1, self.padded_kv),
        }
        rows, every = self.groups * spec.block_q, size_of(self.batch) * self.hk
        at_once = tiles.heads_at_once(rows, spec.block_kv, max(d, dv), every)
        if by_key and call.bias is not None and call.bias.shape[:2] != (self.batch, h):
            at_once = 1  # heads share entries of the bias gradient
        self.heads = Heads.of(self.batch, self.hk, at_once)
        together = self.heads.together
        self.head: dict[str, Any] = {
            "mask": HeadMask.of(grid, call.mask, call.pattern, by_key=by_key, together=together),
            "bias": None if call.bias is None else grid.per_head(call.bias)[:, :, None],
            "drop": None,
        }
        self.drop = None
        if spec.dropout_prob > 0.0:
            self.drop = Dropout.make(call.seed, self.batch, h, self.q_len, self.kv_len)
            base = self.drop.base.reshape(self.batch, self.hk, 1, self.groups)
            self.head["drop"] = base
        self.dtype = accumulation_dtype(call.q, call.k, call.v, at_least=spec.logits_dtype)
        # a float query is scaled once instead of its logits, which are then in base 2 as they are
        self.spec, self.factor = spec, 1.0
        if call.bias is None and spec.soft_cap is None and spec.logits_dtype == call.q.dtype:
            self.spec, self.factor = replace(spec, scale=sm.LN2), spec.scale * sm.LOG2E

    def rows(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """``[b, q, h, ...]`` -> ``[b, q, hk, g, ...]``."""
        pad = [(0, 0)] * x.ndim
        pad[1] = (0, self.padded_q - self.q_len)
        x = jnp.pad(x, pad, constant_values=fill) if self.padded_q > self.q_len else x
        return x.reshape(self.batch, self.padded_q, self.hk, self.groups, *x.shape[3:])

    def map(self, function: Callable, outputs: Any, total: Any = None) -> tuple:
        """``function(q, k, v, bias, **rows, **options of a pass)`` for every head.

        ``outputs`` ``[b, s, hk, ...]`` are overwritten with its first result ``[1, s, ...]``.
        """

        def one(head: dict[str, Any], sequences: dict[str, Any]) -> tuple:
            x = {n: s[None] for n, s in sequences.items()}
            q, k, v = x.pop("q"), x.pop("k")[:, :, None], x.pop("v")[:, :, None]
            if self.factor != 1.0:
                q = q * jnp.asarray(self.factor, q.dtype)
            drop = self.drop
            if drop is not None:
                drop = replace(drop, base=head["drop"])
            return function(q, k, v, head["bias"], mask=head["mask"], dropout=drop, **x)

        return self.heads.map(one, self.head, self.sequences, outputs, total)

    def new_rows(self, *rest: int) -> jax.Array:
        """Zeros ``[b, q, hk, g, *rest]`` to write."""
        shape = (self.batch, self.padded_q, self.hk, self.groups, *rest)
        return zeros(shape, self.dtype, self.call.q)

    def new_keys(self, dim: int) -> jax.Array:
        """Zeros ``[b, k, hk, dim]`` to write."""
        return zeros((self.batch, self.padded_kv, self.hk, dim), self.dtype, self.call.q)

    def from_rows(self, x: jax.Array) -> jax.Array:
        """``[b, q, hk, g, ...]`` -> ``[b, q, h, ...]`` without padding."""
        return x.reshape(*x.shape[:2], self.hk * self.groups, *x.shape[4:])[:, : self.q_len]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, *arrays):
    return _attend_fwd(plan, *arrays)[0]


def _attend_fwd(plan: Plan, *arrays):
    call = _Call(*arrays)
    walk = _Walk(plan, plan.fwd, call, by_key=False)

    def one(*x: Any, **options: Any) -> tuple:
        o, rows = blockwise.forward(walk.spec, *x, **options)
        return (o, *rows), None

    outputs = (walk.new_rows(call.v.shape[-1]), walk.new_rows(), walk.new_rows())
    o, *rows = map(walk.from_rows, walk.map(one, outputs)[0])
    o, lse, shares = sm.settle(o, sm.Rows(*rows), call.sinks, walk.spec.unit(call.bias))
    o, lse, shares = named(o.astype(call.q.dtype), lse, shares)
    return (o, lse), (*arrays, o, shares)


def _attend_bwd(plan: Plan, residuals, cotangents):
    *arrays, o, shares = residuals
    do, dlse = cotangents
    call = _Call(*arrays)
    delta = blockwise.row_delta(o, do, dlse, shares.m.dtype)
    walk = _Walk(plan, plan.bwd, call, by_key=True)
    walk.sequences |= {
        "m": walk.rows(shares.m),
        "share": walk.rows(shares.share, sm.DEAD),
        "delta": walk.rows(delta),
        "do": walk.rows(do),
    }

    def one(*x: Any, m: jax.Array, share: jax.Array, **options: Any) -> tuple:
        grads = blockwise.backward(walk.spec, *x, shares=sm.Shares(m, share), **options)
        dq = grads.dq if walk.factor == 1.0 else grads.dq * walk.factor
        return (dq, grads.dk, grads.dv), grads.dbias

    dbias = walk.head["bias"]
    if dbias is not None:
        rows = 1 if dbias.shape[4] == 1 else walk.padded_q
        full = (*dbias.shape[:4], rows, walk.padded_kv)
        dbias = zeros(full, shares.m.dtype, call.q)
    d, dim_v = call.q.shape[-1], call.v.shape[-1]
    outputs = (walk.new_rows(d), walk.new_keys(d), walk.new_keys(dim_v))
    (dq, dk, dv), dbias = walk.map(one, outputs, dbias)
    if dbias is not None and call.bias is not None:
        dbias = dbias[..., : walk.q_len, : walk.kv_len].reshape(call.bias.shape)
        dbias = dbias.astype(call.bias.dtype)
    return (
        walk.from_rows(dq).astype(call.q.dtype),
        dk[:, : walk.kv_len].astype(call.k.dtype),
        dv[:, : walk.kv_len].astype(call.v.dtype),
        dbias,
        sm.sink_gradient(call.sinks, shares, delta),
        None,
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
    mask: Any,
    pattern: jax.Array | None,
    seed: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """o ``[b, q, h, dv]`` in the query dtype and the natural lse ``[b, q, h]``, differentiable.

    ``pattern`` is bool ``[#b, #h, blocks of queries, blocks of keys]`` or None.
    """
    if 0 in (*q.shape[:3], *k.shape[1:3]):
        dtype = accumulation_dtype(q, k, v)
        o = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
        return o, jnp.full(q.shape[:3], -jnp.inf, dtype)
    arrays: Any = _Call(q, k, v, bias, sinks, mask, pattern, seed)
    return _compiled(plan, *vary_alike(arrays))
