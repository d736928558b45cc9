"""Block specs of a grid step, from the table of visited blocks, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout


def table_entry(layout: Layout, blocks: int, batch: Any, head: Any, block: Any) -> Any:
    """Returns the index of an outer block's entry in the table; ``head``: of queries."""
    row = batch if layout.table_rows > 1 else 0
    if layout.table_heads > 1:
        row = row * layout.table_heads + head
    return (row * blocks + block) * (1 + layout.steps if layout.listed else 4)


def visited_block(layout: Layout, table: Any, first: Any, step: Any) -> Any:
    """Returns the inner block of a step of the outer block whose entry starts at ``first``.

    Past the last visited block it stays, so that nothing more is fetched.
    """
    if layout.listed:
        return table[first + 1 + jnp.minimum(step, jnp.maximum(table[first] - 1, 0))] // 2
    return jnp.minimum(table[first] + step, jnp.maximum(table[first + 3] - 1, 0))


@dataclass(frozen=True)
class Specs:
    """Blocks of the grid (batch, head, query block, step) over key blocks, or with ``keys_outer``
    (batch, kv head, key block, head of the group, step) over query blocks.

    Index maps get the grid's indices and the table as ``at``.

    ``keeps_queries``: whether a kernel adds to the same queries in every key block.
    """

    layout: Layout
    keys_outer: bool = False
    keeps_queries: bool = False

    @property
    def grid(self) -> tuple[int, ...]:
        p, layout = self.layout.problem, self.layout
        if self.keys_outer:
            return p.batch, p.kv_heads, layout.kv_blocks, p.group, layout.steps
        return p.batch, p.heads, layout.q_blocks, layout.steps

    @property
    def semantics(self) -> tuple[str, ...]:
        parallel = 2 if self.keeps_queries else 3
        return ("parallel",) * parallel + ("arbitrary",) * (len(self.grid) - parallel)

    def _visited(self, at: tuple) -> Any:
        layout, (b, _, outer, *_, step, table) = self.layout, at
        blocks = layout.kv_blocks if self.keys_outer else layout.q_blocks
        first = table_entry(layout, blocks, b, self._head(at), outer)
        return visited_block(layout, table, first, step)

    def _q_block(self, at: tuple) -> Any:
        return self._visited(at) if self.keys_outer else at[2]

    def _kv_block(self, at: tuple) -> Any:
        return at[2] if self.keys_outer else self._visited(at)

    def _head(self, at: tuple) -> Any:
        return at[1] * self.layout.problem.group + at[3] if self.keys_outer else at[1]

    def _kv_head(self, at: tuple) -> Any:
        return at[1] if self.keys_outer else at[1] // self.layout.problem.group

    def query(self, width: int) -> pl.BlockSpec:
        """Returns the block spec of query rows of ``width`` columns, in ``Layout.shape``."""
        block = (1, 1, self.layout.tiles.block_q, width)
        index = self.layout.block_index
        return pl.BlockSpec(block, lambda *at: index(at[0], self._head(at), self._q_block(at)))

    def head_queries(self) -> pl.BlockSpec:
        """Returns the block spec of all query rows of a kv head."""
        group, rows, width = self.layout.problem.group, self.layout.q_padded, self.layout.dim
        joined, index = self.layout.tiles.joins_heads, self.layout.block_index
        block = (1, 1, rows, group * width) if joined else (1, group, rows, width)
        return pl.BlockSpec(block, lambda *at: index(at[0], at[1], 0))

    def key(self, width: int) -> pl.BlockSpec:
        """Returns the block spec of key rows of ``width`` columns, in ``Layout.shape``."""
        block = (1, 1, self.layout.tiles.block_kv, width)
        index = self.layout.block_index
        return pl.BlockSpec(block, lambda *at: index(at[0], self._kv_head(at), self._kv_block(at)))

    def statistic(self) -> pl.BlockSpec:
        """Returns the block spec of ``[b, h, 1, q]``: lse and delta."""
        block = (1, 1, 1, self.layout.tiles.block_q)
        return pl.BlockSpec(block, lambda *at: (at[0], self._head(at), 0, self._q_block(at)))

    def statistic_output(self) -> tuple[pl.BlockSpec, tuple[int, ...], str]:
        """Returns block spec, shape and dtype of a float32 for each query row."""
        p = self.layout.problem
        return self.statistic(), (p.batch, p.heads, 1, self.layout.q_padded), "float32"

    def query_values(self, x: jax.Array) -> pl.BlockSpec:
        """Returns the block spec of ``[#b, 1, q]``."""
        block, by_batch = (1, 1, self.layout.tiles.block_q), x.shape[0] > 1
        return pl.BlockSpec(block, lambda *at: (at[0] if by_batch else 0, 0, self._q_block(at)))

    def key_values(self, x: jax.Array) -> pl.BlockSpec:
        """Returns the block spec of ``[#b, 1, k]``."""
        block, by_batch = (1, 1, self.layout.tiles.block_kv), x.shape[0] > 1
        return pl.BlockSpec(block, lambda *at: (at[0] if by_batch else 0, 0, self._kv_block(at)))


def launch_kernel(
    body: Callable[..., None],
    name: str,
    specs: Specs,
    table: Any,
    operands: Sequence[Any],
    in_specs: Sequence[Any],
    outputs: Sequence[tuple[pl.BlockSpec, tuple[int, ...], str]],
    scratch: Sequence[Any],
    *,
    accumulators: int,
    columns: int,
    moved: int,
    outside_blocks: int = 0,
    hbm_outputs: Sequence[Any] = (),
    collective_id: int | None = None,
) -> list[jax.Array]:
    """Launches ``body(layout, table, *refs)``; outputs are block spec, shape and dtype each.

    An operand may be None or a tree of arrays: ``body`` gets None, or the tree with their refs.
    ``columns``: of the matmuls of a visited pair, for the cost; ``moved``: bytes in addition to
    the inner blocks; ``outside_blocks``: bytes of vector memory for what is not of a block;
    ``hbm_outputs``: types of further outputs, in device memory;
    ``collective_id``: of the barrier semaphore of a kernel that talks to others.
    """
    layout, p, t = specs.layout, specs.layout.problem, specs.layout.tiles
    outer, inner = (t.block_kv, t.block_q) if specs.keys_outer else (t.block_q, t.block_kv)
    length = layout.kv_padded if specs.keys_outer else layout.q_padded
    visited = p.batch * p.heads * length * layout.steps * inner
    arrays = jax.tree.leaves(operands)
    inner_bytes = visited // outer * (layout.dim + layout.value_dim) * p.itemsize
    return pl.pallas_call(
        functools.partial(body, layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=specs.grid,
            in_specs=in_specs,
            out_specs=[
                *(spec for spec, _, _ in outputs),
                *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in hbm_outputs),
            ],
            scratch_shapes=scratch,
        ),
        out_shape=[*(result(shape, dtype, *arrays) for _, shape, dtype in outputs), *hbm_outputs],
        compiler_params=layout.compiler_params(
            specs.semantics, outside_blocks + t.vmem(p, outer, accumulators), collective_id
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * visited * columns, transcendentals=visited, bytes_accessed=moved + inner_bytes
        ),
        interpret=layout.chip.interpret,
        name=name,
    )(table, *operands)
