"""``shares`` inside a kernel: each program finds its own run, from the lengths alone.

Every warp does it for itself: a lane has so many sequences in a row, and what lanes found goes
through the warp. No other program is asked, and no launch comes before.
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
from ejkernel.kernels.pallas.gpu.mla_decode.shares import CUT, LEAST, OPENING, SHORT, UNEVEN

LANES = 32


def _over_warp(how: str, x: Any) -> Any:
    return asm(f"redux.sync.{how}.s32 $0, $1, 0xffffffff;", "=r,r", i32(), x)


def _sum_to_lane(x: Any) -> Any:
    """The sum of ``x`` of all lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        text = (
            "{ .reg .pred p; .reg .b32 t; "
            f"shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff; "
            "@!p mov.b32 t, 0; add.s32 $0, $1, t; }"
        )
        x = asm(text, "=r,r", i32(), x)
    return x


def _for(count: int, carry: list[Any], body: Callable[..., list[Any]]) -> list[Any]:
    loop = scf.ForOp(constant(0), constant(count), constant(1), carry)
    with ir.InsertionPoint(loop.body):
        scf.yield_(body(loop.induction_variable, *loop.inner_iter_args))
    return list(loop.results)


def deal(
    lengths: Any, run: jax.Array, *, groups: int, step: int, capacity: int
) -> tuple[jax.Array, ...]:
    """(first sequence, its step, how many steps, the cut) of a run, int32.

    The cut, ``CUT`` numbers: of the sequence that goes on in the next run, which it is, its first
    part, how many parts, and how many runs before this one it began. No parts: there is none.
    """
    b = lengths.shape[0]
    mine, together = -(-b // LANES), -(-b // groups)
    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=(number,) * (3 + CUT))
    def apply(_: Any, lengths: Any, run: Any) -> tuple[Any, ...]:
        run = run.registers.item()
        lane = arith.andi(thread(), constant(LANES - 1))

        def steps(i: Any) -> Any:
            x = memref.load(lengths, indices(arith.minsi(i, constant(b - 1))))
            x = arith.minsi(arith.maxsi(x, constant(0)), constant(capacity))
            x = arith.divui(arith.addi(x, constant(step - 1)), constant(step))
            return arith.select(compare("slt", i, constant(b)), x, constant(0))

        def if_less(a: Any, b: Any, x: Any) -> Any:
            return arith.select(compare("slt", a, b), x, constant(0))

        top = arith.muli(lane, constant(mine))  # this lane's first sequence
        whole_from = arith.muli(run, constant(together))
        whole_to = arith.addi(whole_from, constant(together))

        def count(t: Any, own: Any, filled: Any, before: Any, inside: Any) -> list[Any]:
            i = arith.addi(top, t)
            x = steps(i)
            upto = if_less(i, whole_to, x)
            early = if_less(i, whole_from, x)
            return [
                arith.addi(own, x),
                arith.addi(filled, if_less(constant(0), x, constant(1))),
                arith.addi(before, early),
                arith.addi(inside, arith.subi(upto, early)),
            ]

        own, filled, before, inside = _for(mine, [constant(0)] * 4, count)
        every, before, inside = (_over_warp("add", x) for x in (own, before, inside))
        opening = arith.divui(every, constant(SHORT * groups))
        opening = arith.minsi(opening, constant(OPENING))

        def cost(x: Any) -> Any:
            return if_less(constant(0), x, arith.addi(x, opening))

        owned = arith.addi(own, arith.muli(filled, opening))
        most = _over_warp("add", owned)
        start = arith.subi(_sum_to_lane(own), own)
        opens = arith.subi(_sum_to_lane(owned), owned)

        def longer(n: Any, longest: Any) -> list[Any]:
            first = arith.addi(lane, arith.muli(n, constant(LANES)))
            first = arith.muli(first, constant(together))
            (x,) = _for(
                together,
                [constant(0)],
                lambda t, x: [arith.addi(x, cost(steps(arith.addi(first, t))))],
            )
            return [arith.maxsi(longest, x)]

        # groups past the last have no sequences
        (longest,) = _for(-(-groups // LANES), [constant(0)], longer)
        longest = _over_warp("max", longest)
        even = arith.divui(arith.addi(most, constant(groups - 1)), constant(groups))
        even = arith.maxsi(even, constant(LEAST))
        up, down = UNEVEN
        whole = compare("sle", arith.muli(longest, constant(down)), arith.muli(even, constant(up)))
        cut_from = arith.muli(run, even)
        cut_to = arith.addi(cut_from, even)

        def within(t: Any, at: Any, first: Any, to: Any, *found: Any) -> list[Any]:
            """Steps before both bounds; what the sequence around the second has."""
            i = arith.addi(top, t)
            x = steps(i)
            begin, end = arith.addi(at, opening), arith.addi(at, cost(x))
            upto = [
                arith.minsi(arith.maxsi(arith.subi(bound, begin), constant(0)), x)
                for bound in (cut_from, cut_to)
            ]
            over = arith.andi(compare("slt", begin, cut_to), compare("sgt", end, cut_to))
            new = (i, at, end)
            chosen = [arith.select(over, n, f) for n, f in zip(new, found, strict=True)]
            return [end, arith.addi(first, upto[0]), arith.addi(to, upto[1]), *chosen]

        _, first, to, *cut = _for(mine, [opens, *[constant(0)] * 5], within)
        first, to = (_over_warp("add", x) for x in (first, to))
        sequence, at, end = (_over_warp("max", x) for x in cut)
        bound = arith.select(whole, before, first)
        taken = arith.select(whole, inside, arith.subi(to, first))

        def behind(t: Any, end: Any, ended: Any, last: Any) -> list[Any]:
            i = arith.addi(top, t)
            end = arith.addi(end, steps(i))
            over = arith.andi(compare("sle", end, bound), compare("slt", i, constant(b)))
            ended = arith.addi(ended, arith.extui(i32(), over))
            return [end, ended, arith.select(over, arith.maxsi(last, end), last)]

        _, ended, last = _for(mine, [start, constant(0), constant(0)], behind)
        first = arith.minsi(_over_warp("add", ended), constant(b - 1))
        there = arith.subi(bound, _over_warp("max", last))
        # the run of the cut sequence's first step, and whether another sequence begins that run
        began = arith.divui(arith.addi(at, opening), even)
        later = arith.extui(i32(), compare("sgt", at, arith.muli(began, even)))
        ending = arith.divui(arith.subi(end, constant(1)), even)
        none = arith.ori(whole, compare("eq", end, constant(0)))
        parts = arith.addi(arith.subi(ending, began), constant(1))
        found = (
            first,
            there,
            taken,
            sequence,
            arith.addi(arith.muli(began, constant(2)), later),
            arith.select(none, constant(0), parts),
            arith.subi(run, began),
        )
        return tuple(map(splat, found))

    return apply(lengths, run)
