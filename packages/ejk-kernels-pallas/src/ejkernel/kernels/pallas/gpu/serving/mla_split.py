"""The split schedule of latent decoding inside a kernel: each program finds its unit by itself.

The schedule, its reasons and its reference are ``types.serving.split``. Every warp computes it from
the lengths: a lane has a few sequences in a row, and lanes combine their results. So there is no
table, and no launch before the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.registers import (
    SCALAR,
    arith,
    asm,
    compare,
    constant,
    i32,
    indices,
    memref,
    scf,
    splat,
    thread,
)
from ejkernel.types.serving import split as split_rule
from ejkernel.types.serving.split import (
    EVENNESS,
    MAX_FIXED_SPLITS,
    MIN_STEPS,
    OVERHEAD_SHARE,
    SEQUENCE_OVERHEAD,
    CutSequence,
    SplitUnit,
)

LANES = 32


def _over_warp(operation: str, x: Any) -> Any:
    """Returns a reduction of ``x`` of all lanes: add or max."""
    return asm(f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;", "=r,r", i32(), x)


def _sum_to_lane(x: Any) -> Any:
    """Returns the sum of ``x`` of all lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        text = (
            "{ .reg .pred p; .reg .b32 t; "
            f"shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff; "
            "@!p mov.b32 t, 0; add.s32 $0, $1, t; }"
        )
        x = asm(text, "=r,r", i32(), x)
    return x


def _for(count: int, carry: list[Any], body: Callable[..., list[Any]]) -> list[Any]:
    """Builds a loop of ``count`` rounds of ``carry = body(i, *carry)``; returns the last carry."""
    loop = scf.ForOp(constant(0), constant(count), constant(1), carry)
    with ir.InsertionPoint(loop.body):
        scf.yield_(body(loop.induction_variable, *loop.inner_iter_args))
    return list(loop.results)


def _load_steps(lengths: Any, i: Any, step: int, capacity: int) -> Any:
    """Returns the steps of sequence i, 0 behind the last."""
    (b,) = ir.MemRefType(lengths.type).shape
    x = memref.load(lengths, indices(arith.minsi(i, constant(b - 1))))
    x = arith.minsi(arith.maxsi(x, constant(0)), constant(capacity))
    x = arith.divui(arith.addi(x, constant(step - 1)), constant(step))
    return arith.select(compare("slt", i, constant(b)), x, constant(0))


def find_split(lengths: Any, unit: jax.Array, *, step: int, capacity: int) -> tuple[Any, Any]:
    """Returns the sequence and the split of a unit, int32, as ``split_order`` has them.

    The split is behind the last one where there are fewer splits than units.
    """
    b = lengths.shape[0]
    lane_count = -(-b // LANES)
    most = split_rule.FIXED_STEPS
    longest = max(most, -(-capacity // (step * MAX_FIXED_SPLITS)))
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=(scalar, scalar))
    def apply(_: Any, lengths: Any, unit: Any) -> tuple[Any, ...]:
        unit = unit.registers.item()
        lane = arith.andi(thread(), constant(LANES - 1))
        first = arith.muli(lane, constant(lane_count))  # this lane's first sequence
        sequences = [arith.addi(first, constant(t)) for t in range(lane_count)]
        counts, sizes = [], []  # splits, and the steps of the longest one
        for i in sequences:
            steps = _load_steps(lengths, i, step, capacity)
            count = arith.divui(arith.addi(steps, constant(most - 1)), constant(most))
            count = arith.minsi(arith.maxsi(count, constant(1)), constant(MAX_FIXED_SPLITS))
            size = arith.addi(steps, arith.subi(count, constant(1)))
            sizes.append(arith.divui(size, count))
            counts.append(arith.select(compare("slt", i, constant(b)), count, constant(0)))

        def splits_where(predicate: str, size: Any) -> Any:
            """Returns the number of this lane's splits whose sequences have such a size."""
            total = constant(0)
            for count, x in zip(counts, sizes, strict=True):
                holds = compare(predicate, x, size)
                total = arith.addi(total, arith.select(holds, count, constant(0)))
            return total

        size = constant(0)  # of the unit: the largest with more splits at or above it than ``unit``
        for bit in reversed(range(longest.bit_length())):
            larger = arith.addi(size, constant(1 << bit))
            before = _over_warp("add", splits_where("sge", larger))
            size = arith.select(compare("sgt", before, unit), larger, size)
        before = _over_warp("add", splits_where("sgt", size))
        of_size = splits_where("eq", size)
        all_splits = arith.addi(before, _over_warp("add", of_size))
        at = arith.subi(arith.addi(before, _sum_to_lane(of_size)), of_size)
        sequence = split = constant(0)
        for i, count, x in zip(sequences, counts, sizes, strict=True):
            end = arith.select(compare("eq", x, size), arith.addi(at, count), at)
            inside = arith.andi(compare("sle", at, unit), compare("slt", unit, end))
            sequence = arith.select(inside, i, sequence)
            split = arith.select(inside, arith.subi(unit, at), split)
            at = end
        sequence, split = (_over_warp("max", x) for x in (sequence, split))
        is_empty = compare("sge", unit, all_splits)
        split = arith.select(is_empty, constant(MAX_FIXED_SPLITS), split)
        return splat(sequence), splat(split)

    return apply(lengths, unit)


def find_unit(lengths: Any, unit: jax.Array, *, units: int, step: int, capacity: int) -> SplitUnit:
    """Returns the work range of a unit, int32, as ``split_schedule`` has it.

    ``cut`` is arbitrary where its ``partials`` are 0, and so is the sequence of a unit without
    steps.
    """
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    results = (scalar,) * (len(SplitUnit._fields) - 1 + len(CutSequence._fields))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=results)
    def apply(_: Any, lengths: Any, unit: Any) -> tuple[Any, ...]:
        search = _UnitSearch(lengths, unit.registers.item(), units, step, capacity)
        return tuple(map(splat, search.find()))

    *work_range, sequence, first_partial, partials, units_before = apply(lengths, unit)
    cut = CutSequence(sequence, first_partial, partials, units_before)
    return SplitUnit(*work_range, cut)


def _if_less(a: Any, b: Any, x: Any) -> Any:
    """Returns x where a < b, else 0."""
    return arith.select(compare("slt", a, b), x, constant(0))


class _UnitSearch:
    """Finds the work range of a unit; each lane reads the lengths of some sequences in a row."""

    def __init__(self, lengths: Any, unit: Any, units: int, step: int, capacity: int) -> None:
        (self.b,) = ir.MemRefType(lengths.type).shape
        self.lengths, self.unit, self.units = lengths, unit, units
        self.step, self.capacity = step, capacity
        # sequences of a lane, of a unit
        self.lane_count, self.unit_count = -(-self.b // LANES), -(-self.b // units)
        self.lane = arith.andi(thread(), constant(LANES - 1))
        self.top = arith.muli(self.lane, constant(self.lane_count))  # this lane's first sequence

    def find(self) -> tuple[Any, ...]:
        """Returns the fields of the unit's ``SplitUnit``, and of its ``CutSequence``."""
        lane_steps, filled, before, inside = self.count_steps()
        all_steps, before, inside = (_over_warp("add", x) for x in (lane_steps, before, inside))
        overhead = arith.divui(all_steps, constant(OVERHEAD_SHARE * self.units))
        self.overhead = arith.minsi(overhead, constant(SEQUENCE_OVERHEAD))
        lane_cost = arith.addi(lane_steps, arith.muli(filled, self.overhead))
        all_cost = _over_warp("add", lane_cost)
        start = arith.subi(_sum_to_lane(lane_steps), lane_steps)
        cost_start = arith.subi(_sum_to_lane(lane_cost), lane_cost)
        longest = self.longest_unit()
        even = arith.divui(arith.addi(all_cost, constant(self.units - 1)), constant(self.units))
        even = arith.maxsi(even, constant(MIN_STEPS))
        up, down = EVENNESS
        complete = compare(
            "sle", arith.muli(longest, constant(down)), arith.muli(even, constant(up))
        )
        first, to, cut = self.cut_evenly(even, cost_start)
        bound = arith.select(complete, before, first)
        steps = arith.select(complete, inside, arith.subi(to, first))
        sequence, step_in_sequence = self.find_sequence(bound, start)
        return (sequence, step_in_sequence, steps, *self.cut_sequence(even, complete, *cut))

    def steps_of(self, i: Any) -> Any:
        return _load_steps(self.lengths, i, self.step, self.capacity)

    def cost(self, steps: Any) -> Any:
        """Returns the cost of a sequence: its steps and, if it has any, the overhead."""
        return _if_less(constant(0), steps, arith.addi(steps, self.overhead))

    def count_steps(self) -> list[Any]:
        """Counts this lane's steps, its sequences with steps, and its steps before and in the unit
        if units are complete sequences."""
        complete_from = arith.muli(self.unit, constant(self.unit_count))
        complete_to = arith.addi(complete_from, constant(self.unit_count))

        def add(t: Any, total: Any, filled: Any, before: Any, inside: Any) -> list[Any]:
            i = arith.addi(self.top, t)
            x = self.steps_of(i)
            to_end = _if_less(i, complete_to, x)
            to_start = _if_less(i, complete_from, x)
            return [
                arith.addi(total, x),
                arith.addi(filled, _if_less(constant(0), x, constant(1))),
                arith.addi(before, to_start),
                arith.addi(inside, arith.subi(to_end, to_start)),
            ]

        return _for(self.lane_count, [constant(0)] * 4, add)

    def longest_unit(self) -> Any:
        """Returns the largest cost of a unit if units are complete sequences."""

        def longer(n: Any, longest: Any) -> list[Any]:
            first = arith.addi(self.lane, arith.muli(n, constant(LANES)))
            first = arith.muli(first, constant(self.unit_count))
            (x,) = _for(
                self.unit_count,
                [constant(0)],
                lambda t, x: [arith.addi(x, self.cost(self.steps_of(arith.addi(first, t))))],
            )
            return [arith.maxsi(longest, x)]

        # units past the last have no sequences
        (longest,) = _for(-(-self.units // LANES), [constant(0)], longer)
        return _over_warp("max", longest)

    def cut_evenly(self, even: Any, cost_start: Any) -> tuple[Any, Any, list[Any]]:
        """Returns the steps before either bound of the unit if units have the cost ``even``.

        Third are the sequence around the second bound, and the costs before it and with it.
        """
        cut_from = arith.muli(self.unit, even)
        cut_to = arith.addi(cut_from, even)

        def add(t: Any, at: Any, first: Any, to: Any, *chosen: Any) -> list[Any]:
            i = arith.addi(self.top, t)
            x = self.steps_of(i)
            begin, end = arith.addi(at, self.overhead), arith.addi(at, self.cost(x))
            to_bounds = [
                arith.minsi(arith.maxsi(arith.subi(bound, begin), constant(0)), x)
                for bound in (cut_from, cut_to)
            ]
            over = arith.andi(compare("slt", begin, cut_to), compare("sgt", end, cut_to))
            candidate = (i, at, end)
            selected = [arith.select(over, n, f) for n, f in zip(candidate, chosen, strict=True)]
            return [end, arith.addi(first, to_bounds[0]), arith.addi(to, to_bounds[1]), *selected]

        _, first, to, *cut = _for(self.lane_count, [cost_start, *[constant(0)] * 5], add)
        first, to = (_over_warp("add", x) for x in (first, to))
        return first, to, [_over_warp("max", x) for x in cut]

    def find_sequence(self, bound: Any, start: Any) -> tuple[Any, Any]:
        """Returns the sequence of step ``bound`` of all sequences, and the step in it.

        ``start``: steps before this lane's first sequence.
        """

        def add(t: Any, end: Any, ended: Any, last: Any) -> list[Any]:
            i = arith.addi(self.top, t)
            end = arith.addi(end, self.steps_of(i))
            over = arith.andi(compare("sle", end, bound), compare("slt", i, constant(self.b)))
            ended = arith.addi(ended, arith.extui(i32(), over))
            return [end, ended, arith.select(over, arith.maxsi(last, end), last)]

        _, ended, last = _for(self.lane_count, [start, constant(0), constant(0)], add)
        sequence = arith.minsi(_over_warp("add", ended), constant(self.b - 1))
        return sequence, arith.subi(bound, _over_warp("max", last))

    def cut_sequence(
        self, even: Any, complete: Any, sequence: Any, at: Any, end: Any
    ) -> tuple[Any, ...]:
        """Returns the fields of ``CutSequence`` of a sequence with the costs from ``at`` to
        ``end``."""
        # the unit of the sequence's first step, and whether another sequence begins that unit
        began = arith.divui(arith.addi(at, self.overhead), even)
        later = arith.extui(i32(), compare("sgt", at, arith.muli(began, even)))
        ending = arith.divui(arith.subi(end, constant(1)), even)
        none = arith.ori(complete, compare("eq", end, constant(0)))
        partials = arith.addi(arith.subi(ending, began), constant(1))
        return (
            sequence,
            arith.addi(arith.muli(began, constant(2)), later),
            arith.select(none, constant(0), partials),
            arith.subi(self.unit, began),
        )
