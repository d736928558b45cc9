"""``shares`` inside a kernel: each program finds its own run, from the lengths alone.

Every warp does it for itself: a lane has so many sequences in a row, and what lanes found goes
through the warp. No other program is asked, and no launch comes before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref as _memref

from ejkernel.kernels.pallas.gpu.common.masks import (
    SCALAR,
    arith,
    constant,
    i32,
    llvm,
    scf,
    thread,
)
from ejkernel.kernels.pallas.gpu.mla_decode.shares import LEAST, UNEVEN

memref: Any = _memref
LANES = 32


def _asm(text: str, *given: Any) -> Any:
    places = ",".join(["=r", *"r" * len(given)])
    return llvm.inline_asm(i32(), list(given), text, places, has_side_effects=True)


def _over_warp(how: str, x: Any) -> Any:
    return _asm(f"redux.sync.{how}.s32 $0, $1, 0xffffffff;", x)


def _sum_to_lane(x: Any) -> Any:
    """The sum of ``x`` of all lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        x = _asm(
            "{ .reg .pred p; .reg .b32 t; "
            f"shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff; "
            "@!p mov.b32 t, 0; add.s32 $0, $1, t; }",
            x,
        )
    return x


def _for(count: int, carry: list[Any], body: Callable[..., list[Any]]) -> list[Any]:
    loop = scf.ForOp(constant(0), constant(count), constant(1), carry)
    with ir.InsertionPoint(loop.body):
        scf.yield_(body(loop.induction_variable, *loop.inner_iter_args))
    return list(loop.results)


def deal(
    lengths: Any, run: jax.Array, *, groups: int, step: int, capacity: int
) -> tuple[jax.Array, ...]:
    """(first sequence, its step, how many steps, bound) of a run, int32.

    ``bound``: steps of every run if runs cut sequences, 0 if they do not.
    """
    b = lengths.shape[0]
    mine, together = -(-b // LANES), -(-b // groups)
    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=(number,) * 4)
    def apply(_: Any, lengths: Any, run: Any) -> tuple[Any, ...]:
        run = run.registers.item()
        compare = arith.CmpIPredicate
        lane = arith.andi(thread(), constant(LANES - 1))

        def steps(i: Any) -> Any:
            at = arith.index_cast(ir.IndexType.get(), arith.minsi(i, constant(b - 1)))
            x = memref.load(lengths, [at])
            x = arith.minsi(arith.maxsi(x, constant(0)), constant(capacity))
            x = arith.divui(arith.addi(x, constant(step - 1)), constant(step))
            return arith.select(arith.cmpi(compare.slt, i, constant(b)), x, constant(0))

        def if_less(a: Any, b: Any, x: Any) -> Any:
            return arith.select(arith.cmpi(compare.slt, a, b), x, constant(0))

        top = arith.muli(lane, constant(mine))  # this lane's first sequence
        whole_from = arith.muli(run, constant(together))
        whole_to = arith.addi(whole_from, constant(together))

        def count(t: Any, own: Any, before: Any, inside: Any) -> list[Any]:
            i = arith.addi(top, t)
            x = steps(i)
            upto = if_less(i, whole_to, x)
            early = if_less(i, whole_from, x)
            return [
                arith.addi(own, x),
                arith.addi(before, early),
                arith.addi(inside, arith.subi(upto, early)),
            ]

        own, before, inside = _for(mine, [constant(0)] * 3, count)
        most, before, inside = (_over_warp("add", x) for x in (own, before, inside))
        start = arith.subi(_sum_to_lane(own), own)

        def longer(n: Any, longest: Any) -> list[Any]:
            first = arith.addi(lane, arith.muli(n, constant(LANES)))
            first = arith.muli(first, constant(together))
            (x,) = _for(
                together,
                [constant(0)],
                lambda t, x: [arith.addi(x, steps(arith.addi(first, t)))],
            )
            return [arith.maxsi(longest, x)]

        # groups past the last have no sequences
        (longest,) = _for(-(-groups // LANES), [constant(0)], longer)
        longest = _over_warp("max", longest)
        even = arith.divui(arith.addi(most, constant(groups - 1)), constant(groups))
        even = arith.maxsi(even, constant(LEAST))
        up, down = UNEVEN
        whole = arith.cmpi(
            compare.sle, arith.muli(longest, constant(down)), arith.muli(even, constant(up))
        )
        cut_from = arith.minsi(arith.muli(run, even), most)
        cut_to = arith.minsi(arith.addi(cut_from, even), most)
        bound = arith.select(whole, before, cut_from)
        taken = arith.select(whole, inside, arith.subi(cut_to, cut_from))

        def behind(t: Any, end: Any, ended: Any, last: Any) -> list[Any]:
            i = arith.addi(top, t)
            end = arith.addi(end, steps(i))
            over = arith.andi(
                arith.cmpi(compare.sle, end, bound), arith.cmpi(compare.slt, i, constant(b))
            )
            ended = arith.addi(ended, arith.extui(i32(), over))
            return [end, ended, arith.select(over, arith.maxsi(last, end), last)]

        _, ended, last = _for(mine, [start, constant(0), constant(0)], behind)
        first = arith.minsi(_over_warp("add", ended), constant(b - 1))
        at = arith.subi(bound, _over_warp("max", last))
        found = (first, at, taken, arith.select(whole, constant(0), even))
        return tuple(
            mgpu.FragmentedArray.splat(
                x, shape=(), layout=mgpu.WGSplatFragLayout(()), is_signed=True
            )
            for x in found
        )

    return apply(lengths, run)
