"""The launches of linear attention as plans: result types, and how ``vmap`` axes become batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejkernel.kernels.triton.common.pieces import piece_count
from ejkernel.kernels.triton.launch import merge_leading, struct
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.roles import Roles, prepared_results
from ejkernel.kernels.triton.linear_attention.tiles import ACROSS, DOWN, Tiles
from ejkernel.kernels.triton.plan import Batched, KernelPlan


@dataclass(frozen=True)
class LinearPlan(Batched, KernelPlan):
    """Common to all."""

    problem: Problem
    tiles: Tiles

    @property
    def segments(self) -> int:
        """Of all batch rows."""
        p = self.problem
        return p.batch * piece_count(p.rows, p.sequences, self.tiles.segment)


def fold_constant(
    plan: Any, given: Sequence[str], size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
) -> tuple[Any, list[jax.Array]]:
    """Where one of the operands ``given`` may be "constant", a number a head: the plan says whether
    all batch rows have it ``shared``."""
    folded, merged = LinearPlan.fold(plan, size, arrays, batched)
    if "constant" not in given:
        return folded, merged
    n = given.index("constant")
    if plan.shared and not batched[n]:
        merged[n] = arrays[n]
        return folded, merged
    merged[n] = merge_leading(size, arrays[n], batched[n], plan.problem.batch)
    return replace(folded, shared=False), merged


@dataclass(frozen=True)
class WalkPlan(LinearPlan):
    """One launch of the walk, in the roles given; ``shared`` as ``fold_constant`` means it."""

    module = "linear_attention.walk"
    roles: Roles
    shared: bool = True

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[Any, list[jax.Array]]:
        given = tuple(self.roles.operands(self.problem))
        return fold_constant(self, given, size, arrays, batched)

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p, t = self.problem, self.tiles
        columns = self.roles.sizes(p)[1]
        state, segments = (p.heads, p.dim, p.value_dim), self.segments
        found = {
            "out": struct(self.roles.out, p.batch, p.rows, p.heads, columns),
            "ends": struct("float32", segments, *state),
            "decays": struct("float32", segments, p.heads),
            "key_decays": struct("float32", segments, p.heads, p.dim),
            "value_decays": struct("float32", segments, p.heads, p.value_dim),
            "states": struct(p.operand, segments * (t.segment // t.chunk), *state),
            "reached": struct("float32", p.batch, p.rows, p.heads, -(-columns // t.columns)),
        }
        return tuple(found[name] for name in self.roles.results(p))


@dataclass(frozen=True)
class ConstantPlan(LinearPlan):
    """Of the operands that ``given`` names; ``shared`` as ``fold_constant`` means it."""

    given: tuple[str, ...]
    shared: bool

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[Any, list[jax.Array]]:
        return fold_constant(self, self.given, size, arrays, batched)


@dataclass(frozen=True)
class SumsPlan(ConstantPlan):
    """gate, constant, cu -> prefix sums of a log decay a row and head, totals of chunks."""

    module = "linear_attention.gates"

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        rows = struct("float32", p.batch, p.rows, p.heads)
        chunks = self.segments * (self.tiles.segment // self.tiles.chunk)
        return rows, rows, struct("float32", chunks, 2, p.heads)


@dataclass(frozen=True)
class StepPlan(ConstantPlan):
    """-> o, final state; see ``steps``."""

    module = "linear_attention.steps"
    in_place: bool

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        state = struct("float32", p.batch * p.states, p.heads, p.dim, p.value_dim)
        return struct(p.out, p.batch, p.rows, p.heads, p.value_dim), state


@dataclass(frozen=True)
class ScanPlan(LinearPlan):
    """ends, (decays), (initial), (cu) -> the states before every segment, and the last one."""

    module = "linear_attention.scan"
    later: bool
    initial: bool

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        state = (p.heads, p.dim, p.value_dim)
        return tuple(struct("float32", n, *state) for n in (self.segments, p.batch * p.states))


@dataclass(frozen=True)
class ReadPlan(LinearPlan):
    """q, k, v, do, (sums of the gate), dstarts, (starts, final), (cu) -> dk and dv of every head in
    the dtypes of ``results``, and where it is ``gated`` what PullPlan needs: over, leaving, read,
    reading."""

    module = "linear_attention.read_gradients"
    gated: bool
    results: tuple[tuple[str, str], ...]

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        rows = (p.batch, p.rows, p.heads)
        columns = {"dkey": p.dim, "dvalue": p.value_dim}
        found = tuple(struct(dtype, *rows, columns[name]) for name, dtype in self.results)
        if not self.gated:
            return found
        sums = (struct("float32", *rows, n) for n in (ACROSS, 1, DOWN))
        return (*found, struct("float32", self.segments, p.heads), *sums)


@dataclass(frozen=True)
class PullPlan(LinearPlan):
    """over, leaving, read, reading, reached, totals of the gate, (cu) -> its gradient."""

    module = "linear_attention.pull"

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        return (struct("float32", p.batch, p.rows, p.heads),)


@dataclass(frozen=True)
class GatePlan(LinearPlan):
    """q, k, v, do, sums of the gate, states, dstates, (cu) -> the gradient of the gate."""

    module = "linear_attention.gate_gradient"

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        return (struct("float32", p.batch, p.rows, p.heads),)


@dataclass(frozen=True)
class ChannelPlan(LinearPlan):
    """Of the arrays that meet through decaying channels, the other two, the gate and sums of its
    halves, cuts, (pairs and totals of the other gate), states, dstates, (cu) -> what is named in
    ``results`` with its dtype: gradients of the array that reads (dreader), of the one that is read
    and of the gate (dsource, dgate); alone, the first is also what rows read, and asks for no array
    that reads and no dstates."""

    module = "linear_attention.channel_gradient"
    of_values: bool
    results: tuple[tuple[str, str], ...]

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        channels = p.value_dim if self.of_values else p.dim
        return tuple(struct(d, p.batch, p.rows, p.heads, channels) for _, d in self.results)


@dataclass(frozen=True)
class PreparePlan(LinearPlan):
    """q, k, gates of keys (or do, v, gates of values), cuts, (cu) -> pairs, both decayed,
    sums of the gates of chunks, and of their halves. Where nothing ``reads``, k or v alone."""

    module = "linear_attention.prepare"
    of_values: bool
    reads: bool

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p, t = self.problem, self.tiles
        channels = p.value_dim if self.of_values else p.dim
        chunks = self.segments * (t.segment // t.chunk)
        rows = struct(p.operand, p.batch, p.rows, p.heads, channels)
        found = {
            "pairs": struct(p.operand, chunks, p.heads, t.chunk, t.chunk),
            "reading": rows,
            "entering": rows,
            "totals": struct("float32", chunks, p.heads, channels),
            "halves": struct("float32", chunks, p.heads, 2, channels),
        }
        return tuple(found[name] for name in prepared_results(self.reads))
