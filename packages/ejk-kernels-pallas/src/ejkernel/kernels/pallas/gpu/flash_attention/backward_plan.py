"""Sizes, order of work and tables of the backward kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.pallas.gpu.common.chip import BARRIERS
from ejkernel.kernels.pallas.gpu.common.schedule import rows_together
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.blocks import matrix_range, structural_ranges
from ejkernel.types.masks.structure import Band


@dataclass(frozen=True)
class BackwardTiles:
    """Tile sizes of the backward kernel.

    Attributes:
        block_q: query rows of a step, 64 or 128.
        block_kv: key rows of a program: 64 for each consumer warpgroup.
        stages: query tiles in flight.
        one_way: whether all heads add their parts of dq in one order, whatever their number (see
            ``Plan.descending``).
        pipelined: whether the fused kernel computes the probabilities of a step under the matmuls
            of the step before (see ``backward_pipelined``); the two fields below are its own.
        q_stages: query tiles of q in flight, of do ``stages``; 0: as many.
        dq_stages: parts of dq between the warpgroups and the copy to global memory, 1 or 2.
    """

    block_q: int = 64
    block_kv: int = 128
    stages: int = 2
    one_way: bool = False
    pipelined: bool = False
    q_stages: int = 0
    dq_stages: int = 1

    @property
    def q_buffers(self) -> int:
        """Tiles of q in flight."""
        return self.q_stages or self.stages

    def shared(self, problem: Problem) -> int:
        """Bytes of shared memory of the fused kernel; over lists, of the kernel of dk and dv."""
        d, dv, size = problem.dim, problem.value_dim, problem.itemsize
        columns = -(-d // 32) * 32  # of k and dq (see ``Plan.key_columns``)
        kv = self.block_kv * (columns + dv) * size
        # with lse and delta
        q = self.block_q * (self.q_buffers * (d * size + 4) + self.stages * (dv * size + 4))
        if problem.pattern_blocks:  # the next keys, and indices of work units
            return 2 * kv + q + self.block_q * 4 + BARRIERS
        ds = 2 * self.block_kv * self.block_q * size
        dq = self.dq_stages * self.block_q * columns * 4
        return kv + q + ds + dq + BARRIERS

    def unsupported(self, problem: Problem, shared: int) -> str | None:
        """Returns why a call cannot run with these tiles, None if it can.

        ``shared``: bytes of shared memory of a program. Only what the form that loops ahead adds:
        other tiles are checked where they are chosen.
        """
        if not self.pipelined:
            others = {"q_stages": 0, "dq_stages": 1}
            changed = [f"{name}={getattr(self, name)!r}" for name, x in others.items()
                     if getattr(self, name) != x]  # fmt: skip
            return f"{', '.join(changed)}: only with pipelined" if changed else None
        need, widest = self.shared(problem), max(problem.dim, problem.value_dim)
        lacking = {
            f"pipelined: head dim {widest}, at most 128": widest > 128,
            "pipelined: a pattern of blocks is not supported": problem.pattern_blocks is not None,
            "pipelined: logits_soft_cap is not supported": problem.soft_cap is not None,
            f"pipelined: {self.q_buffers} tiles of q, at least 2": self.q_buffers < 2,
            f"pipelined: dq_stages={self.dq_stages}, 1 or 2": self.dq_stages not in (1, 2),
            f"pipelined: {need} bytes of shared memory, a program has {shared}": need > shared,
        }
        return next((reason for reason, lacks in lacking.items() if lacks), None)


OF_QUERIES = BackwardTiles(block_q=128, block_kv=64)  # of the kernel of dq alone


def is_wide(problem: Problem) -> bool:
    """Returns whether the head is too wide for the fused kernel."""
    return max(problem.dim, problem.value_dim) > 128


def holds_rows(problem: Problem) -> bool:
    """Returns whether programs of dq hold their rows of q and do in registers.

    Wider heads leave no registers for rows; at 64 the compiler (of CUDA 13.0) puts ds where do is.
    """
    return problem.pattern_blocks is not None and problem.dim == problem.value_dim == 128


def backward_tiles(problem: Problem) -> BackwardTiles:
    """Tile sizes for a problem.

    The dk and dv accumulators of 64 key rows take ``dim`` registers of a thread. At 64 that leaves
    room for logits of 128 queries, which halves the reads of keys and the steps; at 128 it does
    not. Above, two warpgroups share the accumulators of 64 key rows, and dq has a separate kernel.
    """
    if is_wide(problem):
        return BackwardTiles(block_q=64, block_kv=64)
    if problem.pattern_blocks:
        # the memory of partial dq holds more tiles in flight; at 16k, one block in ten of 128, 2, 3
        # and 4 took 400, 383 and 395 us
        return BackwardTiles(_queries(problem), stages=3)
    tiles = BackwardTiles(_queries(problem))
    if not _loops_ahead(problem):
        return tiles
    # at 128 a second part of dq makes calls with a band 1 to 3% faster, and full ones slower; at 96
    # full ones 9% faster
    widest = max(problem.dim, problem.value_dim)
    stages = 1 if widest == 128 and problem.rules.band.empty else 2
    return replace(tiles, pipelined=True, dq_stages=stages)


def _queries(problem: Problem) -> int:
    return 128 if max(problem.dim, problem.value_dim) <= 64 else 64


def _loops_ahead(problem: Problem) -> bool:
    """Returns whether ``pipelined`` is faster: forward and backward by 2 to 9% on an H200.

    With segments it spills.
    """
    return problem.soft_cap is None and not problem.rules.arrays


@dataclass(frozen=True)
class Plan:
    """Everything static about one backward kernel.

    In the fused kernel a program owns one key block of one query head and loops over the query
    blocks that see it. The partial dq of a step is added to global memory in a fixed order of key
    blocks (``turn``), so that the sum is the same in every run; so are dk and dv of the heads that
    share a key head. A program must rarely wait for its turn:

    * ``circular``: every block is visited. Programs launched together, a ``team``, start at
      different query blocks, ``stride`` apart, and wrap around. From the hand-over of a part of dq
      to the addition of the next at the same block more than a step may pass. At a distance of
      one step every program would then wait a little, and those behind it for the sum of all
      such delays: so it is two where there are blocks enough.
    * otherwise key blocks run from the last to the first, query blocks upwards. Causal programs
      start at their own diagonal, again all at different query blocks.

    Of causal programs the longest then start last and end alone. So the last ``descending`` heads
    run the other way, key blocks from the first and query blocks downwards: a program may start
    a visit after the one before it, just when shorter and shorter programs of the heads before
    leave their multiprocessors, and all end together.

    ``listed``: a key block visits the query blocks of its list, upwards, and dq has a separate
    kernel.

    A program waits only for programs that were launched before it.
    """

    problem: Problem
    tiles: BackwardTiles
    circular: bool = False
    cores: int = 132
    descending: int = 0

    @property
    def band(self) -> Band:
        return self.problem.rules.band

    @property
    def listed(self) -> bool:
        return self.problem.pattern_blocks is not None

    @property
    def kv_tail(self) -> bool:
        """Returns whether the last key block is not full."""
        return self.problem.kv_len % self.tiles.block_kv != 0

    @property
    def n_q(self) -> int:
        return -(-self.problem.q_len // self.tiles.block_q)

    @property
    def n_kv(self) -> int:
        return -(-self.problem.kv_len // self.tiles.block_kv)

    @property
    def shares_keys(self) -> bool:
        """Returns whether query heads share k and v."""
        return self.problem.group > 1

    @property
    def lse_in_sum(self) -> bool:
        """Returns whether logits can accumulate onto their row's lse, which saves registers."""
        return self.problem.soft_cap is None

    @property
    def team(self) -> int:
        """Key blocks that wrap around together; all of them must be resident at once."""
        return min(max(self.n_q // 2, 1), self.n_kv, self.cores)

    @property
    def heads_together(self) -> int:
        """Heads whose teams are launched together, where a head has several teams."""
        return max(self.cores // self.team, 1)

    @property
    def dq_by_rows(self) -> bool:
        """Returns whether a warpgroup of the fused kernel computes half of dq's rows.

        So it is for tall tiles; else it computes half of the columns.
        """
        return self.tiles.block_q == self.tiles.block_kv

    @property
    def dq_columns(self) -> int:
        """Columns of dq that a warpgroup of the fused kernel computes, in sixteens."""
        return self.problem.dim if self.dq_by_rows else -(-self.problem.dim // 32) * 16

    def whole_parts(self, columns: int) -> int:
        """Returns ``columns`` rounded up to full parts of dq."""
        return -(-columns // self.dq_columns) * self.dq_columns

    @property
    def key_columns(self) -> int:
        """Columns of k in shared memory: heads of 80 get zeros up to two parts of dq."""
        return self.whole_parts(self.problem.dim)

    def keys(self, r: Any, rows: Any) -> Any:
        """Returns rows of the keys in shared memory, as multiplied by queries."""
        return r.k_smem.at[rows, pl.ds(0, self.problem.dim)]

    @property
    def stride(self) -> int:
        """Query blocks from the start of a program of a team to that of the next."""
        return self.n_q // self.team

    def unit_at(self, index: Any, rows: int, *, by_key: bool) -> tuple[Any, Any]:
        """Returns (row of (batch, head), rank of the block by length) of a queued work unit.

        The blocks of a few of the ``rows`` are taken together, the longest ones first.
        """
        p, t = self.problem, self.tiles
        of_queries, of_keys = structural_ranges(
            [self.band], p.q_len, p.kv_len, t.block_q, t.block_kv
        )
        ranges = of_keys if by_key else of_queries
        costs = tuple(np.maximum(ranges.stop - ranges.start, 0).tolist())
        together = rows_together(rows, costs, self.cores)
        group, within = (f(index, together * len(costs)) for f in (lax.div, lax.rem))
        row = group * together + lax.rem(within, together)
        return row, lax.div(within, together)

    def locate(self, item: Any) -> tuple[Any, Any, Any]:
        """Row of (batch, head), key block and whether query blocks fall, of a program."""
        rows = self.problem.batch * self.problem.heads
        if self.circular:
            return *self._locate_in_team(item, rows), False
        before = (rows - self.descending) * self.n_kv
        row, launched = lax.div(item, self.n_kv), lax.rem(item, self.n_kv)
        block = self.n_kv - 1 - launched
        if not self.descending:
            return row, block, False
        late = item >= before
        over = lax.max(item - before, 0)
        row = lax.select(late, rows - self.descending + lax.rem(over, self.descending), row)
        return row, lax.select(late, lax.div(over, self.descending), block), late

    def _locate_in_team(self, item: Any, rows: int) -> tuple[Any, Any]:
        """Row of (batch, head) and key block of a program that wraps around.

        A team of each of the heads that are launched together, then the next team of each. Heads
        that share keys are far apart: they add to dk and dv one after the other.
        """
        most, team = min(self.heads_together, rows), self.team
        group, within = lax.div(item, most * self.n_kv), lax.rem(item, most * self.n_kv)
        heads = lax.min(most, rows - group * most)  # fewer in the last group
        number = lax.div(within, heads * team)
        size = lax.min(team, self.n_kv - number * team)
        within = within - number * heads * team
        row = group * most + lax.div(within, size)
        if self.shares_keys:
            unshared = rows // self.problem.group
            row = lax.rem(row, unshared) * self.problem.group + lax.div(row, unshared)
        return row, number * team + lax.rem(within, size)


def descending_heads(visited: np.ndarray, rows: int, cores: int) -> int:
    """Returns how many of ``rows`` heads run the other way: as many as run at once.

    0 if lengths are equal. ``visited`` are the ranges of query blocks that are visited, ``[#b, #h,
    n_kv, 4]``.
    """
    lengths = np.maximum(visited[..., 3] - visited[..., 0], 0)
    if (np.diff(lengths, axis=-1) > 0).any() or (lengths == lengths[..., :1]).all():
        return 0
    return min(max(round(cores / lengths.shape[-1]), 1), rows // 2)


def visit_tables(ranges: Any, n_q: int) -> tuple[Any, Any, Any]:
    """Returns the order of work for block ranges ``[#b, #h, n_kv, 4]``.

    The range of every key block is extended until starts and stops both rise with the key block:
    the key blocks that visit a query block are then consecutive, and the turn of a visit is its
    distance from the last of them.

    Returns:
        ranges as visited int32 ``[#b, #h, n_kv, 4]``; the last and the first key block that visit
        each query block, int32 ``[#b, #h, 2, n_q]``; whether any visits it, bool
        ``[#b, #h, n_q]``. NumPy arrays for NumPy ranges.
    """
    xp = np if isinstance(ranges, np.ndarray) else jnp
    start, full_start, full_stop, stop = (ranges[..., c] for c in range(4))
    empty = start >= stop
    start = xp.where(empty, n_q, start)
    stop = xp.where(empty, 0, stop)
    if xp is np:
        start = np.flip(np.minimum.accumulate(np.flip(start, -1), axis=-1), -1)
        stop = np.maximum.accumulate(stop, axis=-1)
    else:
        axis = start.ndim - 1
        start = lax.cummin(jnp.asarray(start), axis=axis, reverse=True)
        stop = lax.cummax(jnp.asarray(stop), axis=axis)
    full_start = xp.where(empty, 0, full_start)
    full_stop = xp.where(empty, 0, full_stop)
    visited = xp.stack([start, full_start, full_stop, stop], axis=-1)
    index = np.arange(n_q)
    last = xp.sum(start[..., None] <= index, axis=-2) - 1
    first = xp.sum(stop[..., None] <= index, axis=-2)
    visitors = xp.stack([last, first], axis=-2)
    return visited.astype(np.int32), visitors.astype(np.int32), last >= first


def ranges_by_query(ranges: Any, n_q: int, group: int) -> Any:
    """Key blocks of groups of query blocks from query blocks of key blocks.

    Args:
        ranges: start, full_start, full_stop, stop of query blocks, int32 ``[#b, #h, n_kv, 4]``.
        n_q: query blocks.
        group: query blocks that are processed together.

    Returns:
        Ranges of key blocks, int32 ``[#b, #h, ceil(n_q / group), 4]``.
    """
    xp = np if isinstance(ranges, np.ndarray) else jnp
    index = np.arange(-(-n_q // group) * group)
    start, full_start, full_stop, stop = (ranges[..., c, None] for c in range(4))
    visible = (start <= index) & (index < stop)
    full = (full_start <= index) & (index < full_stop) | (index >= n_q)
    grouped = (*visible.shape[:-1], -1, group)
    visible = xp.swapaxes(xp.any(visible.reshape(grouped), axis=-1), -1, -2)
    full = xp.swapaxes(xp.all(full.reshape(grouped), axis=-1), -1, -2)
    return matrix_range(xp, visible, full & visible).table(xp)
