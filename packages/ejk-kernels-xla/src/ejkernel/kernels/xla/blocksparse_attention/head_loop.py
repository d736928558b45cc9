"""Each head loops over its own tiles with the blockwise passes.

The work is that of flash attention on the tiles a head visits, 2 matmuls forward and 5 backward
per tile, so it follows the density of the pattern. Where several heads are mapped together, each
with its own list, the outer tiles of every head are sorted by their number of visits, so that
mapping heads together costs little more than one by one.

Memory is O(q_len + kv_len) per head, the lists of tiles, and the caller's bias and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla._common.tiles import Blocks
from ejkernel.kernels.xla.blocksparse_attention import tiles
from ejkernel.kernels.xla.blocksparse_attention.heads import Heads
from ejkernel.kernels.xla.blocksparse_attention.pattern import Grid, HeadMask
from ejkernel.ops.differentiate import Arrays
from ejkernel.ops.varying import zeros
from ejkernel.types.arrays import size_of
from ejkernel.types.attention.problem import LOG2E
from ejkernel.types.attention.rows import LN2
from ejkernel.types.masks.blocks import cdiv, pad_to
from ejkernel.types.masks.prepare import Tiling


class HeadLoop:
    """Arrays of a call as the loop of one head needs them.

    head: arrays ``[#b, #hk, ...]``; sequences: arrays ``[b, s, hk, ...]``, padded to full tiles.
    """

    def __init__(self, problem: Any, blocks: Blocks, arrays: Arrays, *, by_key: bool) -> None:
        spec = Spec.from_problem(problem, blocks)
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        bias, self.like = arrays.get("bias"), q
        (self.batch, self.q_len, h, d), (_, self.kv_len, self.hk, dv) = q.shape, v.shape
        self.groups = h // self.hk
        tiling = Tiling(self.q_len, self.kv_len, spec.block_q, spec.block_kv)
        grid = Grid(tiling, problem.q_block_size, problem.kv_block_size, self.hk, self.groups)
        self.padded_q = cdiv(self.q_len, spec.block_q) * spec.block_q
        self.padded_kv = cdiv(self.kv_len, spec.block_kv) * spec.block_kv
        self.sequences = {
            "q": self.rows(q),
            "k": pad_to(k, 1, self.padded_kv),
            "v": pad_to(v, 1, self.padded_kv),
        }
        rows, every = self.groups * spec.block_q, size_of(self.batch) * self.hk
        at_once = tiles.heads_at_once(rows, spec.block_kv, max(d, dv), every)
        if by_key and bias is not None and bias.shape[:2] != (self.batch, h):
            at_once = 1  # heads share entries of the bias gradient
        self.heads = Heads.choose(self.batch, self.hk, at_once)
        together = self.heads.together
        seen = arrays["mask_info"], arrays.get("block_mask")
        self.head: dict[str, Any] = {
            "mask": HeadMask.build(grid, *seen, by_key=by_key, together=together),
            "bias": None if bias is None else grid.per_head(bias)[:, :, None],
            "drop": None,
        }
        self.drop = None
        if spec.dropout_prob > 0.0:
            seed = arrays.get("dropout_seed")
            self.drop = Dropout.make(seed, self.batch, h, self.q_len, self.kv_len)
            base = self.drop.base.reshape(self.batch, self.hk, 1, self.groups)
            self.head["drop"] = base
        self.dtype = accumulation_dtype(q, k, v, at_least=spec.logits_dtype)
        # a float query is scaled once instead of its logits, which are then in base 2 as they are
        self.spec, self.factor = spec, 1.0
        if bias is None and spec.soft_cap is None and spec.logits_dtype == q.dtype:
            self.spec, self.factor = replace(spec, scale=LN2), spec.scale * LOG2E

    def rows(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """``[b, q, h, ...]`` -> ``[b, q, hk, g, ...]``."""
        pad = [(0, 0)] * x.ndim
        pad[1] = (0, self.padded_q - self.q_len)
        x = jnp.pad(x, pad, constant_values=fill) if self.padded_q != self.q_len else x
        return x.reshape(self.batch, self.padded_q, self.hk, self.groups, *x.shape[3:])

    def map(self, function: Callable, outputs: Any, total: Any = None) -> tuple:
        """``function(q, k, v, bias, **rows, **options of a pass)`` for every head.

        ``outputs`` ``[b, s, hk, ...]`` are overwritten with its first result ``[1, s, ...]``.
        """

        def run_head(head: dict[str, Any], sequences: dict[str, Any]) -> tuple:
            x = {n: s[None] for n, s in sequences.items()}
            q, k, v = x.pop("q"), x.pop("k")[:, :, None], x.pop("v")[:, :, None]
            if self.factor != 1.0:
                q = q * jnp.asarray(self.factor, q.dtype)
            drop = self.drop
            if drop is not None:
                drop = replace(drop, base=head["drop"])
            return function(q, k, v, head["bias"], mask=head["mask"], dropout=drop, **x)

        return self.heads.map(run_head, self.head, self.sequences, outputs, total)

    def new_rows(self, *dims: int) -> jax.Array:
        """Zeros ``[b, q, hk, g, *dims]`` to write."""
        shape = (self.batch, self.padded_q, self.hk, self.groups, *dims)
        return zeros(shape, self.dtype, self.like)

    def new_keys(self, dim: int) -> jax.Array:
        """Zeros ``[b, k, hk, dim]`` to write."""
        return zeros((self.batch, self.padded_kv, self.hk, dim), self.dtype, self.like)

    def from_rows(self, x: jax.Array) -> jax.Array:
        """``[b, q, hk, g, ...]`` -> ``[b, q, h, ...]`` without padding."""
        return x.reshape(*x.shape[:2], self.hk * self.groups, *x.shape[4:])[:, : self.q_len]
