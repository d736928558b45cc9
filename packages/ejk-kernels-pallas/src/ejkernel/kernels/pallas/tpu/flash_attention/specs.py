"""Which block of each array a grid step reads: by the table of visited blocks in scalar memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout

Index = Callable[..., tuple]


def entry(layout: Layout, blocks: int, batch: Any, block: Any) -> Any:
    """Where the table says what a held block visits."""
    return ((batch if layout.table_rows > 1 else 0) * blocks + block) * 4


def _visited(table: Any, first: Any, step: Any) -> Any:
    # past the last visited block its number stays, so that nothing more is fetched
    return jnp.minimum(table[first] + step, jnp.maximum(table[first + 3] - 1, 0))


@dataclass(frozen=True)
class QueriesHeld:
    """Grid (batch, head, query block, step) over key blocks."""

    layout: Layout

    @property
    def grid(self) -> tuple[int, ...]:
        p, layout = self.layout.problem, self.layout
        return p.batch, p.heads, layout.q_blocks, layout.steps

    semantics = ("parallel", "parallel", "parallel", "arbitrary")

    def _key(self, b: Any, i: Any, t: Any, table: Any) -> Any:
        return _visited(table, entry(self.layout, self.layout.q_blocks, b, i), t)

    def query(self, width: int) -> pl.BlockSpec:
        block = (1, 1, self.layout.tiles.block_q, width)
        return pl.BlockSpec(block, lambda b, h, i, t, s: (b, h, i, 0))

    def key(self, width: int) -> pl.BlockSpec:
        group = self.layout.problem.group
        block = (1, 1, self.layout.tiles.block_kv, width)
        return pl.BlockSpec(block, lambda b, h, i, t, s: (b, h // group, self._key(b, i, t, s), 0))

    def statistic(self) -> pl.BlockSpec:
        """Of ``[b, h, 1, q]``: lse and delta."""
        block = (1, 1, 1, self.layout.tiles.block_q)
        return pl.BlockSpec(block, lambda b, h, i, t, s: (b, h, 0, i))

    def query_values(self, x: jax.Array) -> pl.BlockSpec:
        """Of ``[#b, 1, q]``."""
        many = x.shape[0] > 1
        block = (1, 1, self.layout.tiles.block_q)
        return pl.BlockSpec(block, lambda b, h, i, t, s: (b if many else 0, 0, i))

    def key_values(self, x: jax.Array) -> pl.BlockSpec:
        many = x.shape[0] > 1
        block = (1, 1, self.layout.tiles.block_kv)
        return pl.BlockSpec(
            block, lambda b, h, i, t, s: (b if many else 0, 0, self._key(b, i, t, s))
        )


@dataclass(frozen=True)
class KeysHeld:
    """Grid (batch, kv head, key block, head of the group, step) over query blocks."""

    layout: Layout

    @property
    def grid(self) -> tuple[int, ...]:
        p, layout = self.layout.problem, self.layout
        return p.batch, p.kv_heads, layout.kv_blocks, p.group, layout.steps

    semantics = ("parallel", "parallel", "parallel", "arbitrary", "arbitrary")

    def _query(self, b: Any, j: Any, t: Any, table: Any) -> Any:
        return _visited(table, entry(self.layout, self.layout.kv_blocks, b, j), t)

    def query(self, width: int) -> pl.BlockSpec:
        group = self.layout.problem.group
        block = (1, 1, self.layout.tiles.block_q, width)
        return pl.BlockSpec(
            block, lambda b, h, j, g, t, s: (b, h * group + g, self._query(b, j, t, s), 0)
        )

    def key(self, width: int) -> pl.BlockSpec:
        block = (1, 1, self.layout.tiles.block_kv, width)
        return pl.BlockSpec(block, lambda b, h, j, g, t, s: (b, h, j, 0))

    def statistic(self) -> pl.BlockSpec:
        group = self.layout.problem.group
        block = (1, 1, 1, self.layout.tiles.block_q)
        return pl.BlockSpec(
            block, lambda b, h, j, g, t, s: (b, h * group + g, 0, self._query(b, j, t, s))
        )

    def query_values(self, x: jax.Array) -> pl.BlockSpec:
        many = x.shape[0] > 1
        block = (1, 1, self.layout.tiles.block_q)
        return pl.BlockSpec(
            block, lambda b, h, j, g, t, s: (b if many else 0, 0, self._query(b, j, t, s))
        )

    def key_values(self, x: jax.Array) -> pl.BlockSpec:
        many = x.shape[0] > 1
        block = (1, 1, self.layout.tiles.block_kv)
        return pl.BlockSpec(block, lambda b, h, j, g, t, s: (b if many else 0, 0, j))
