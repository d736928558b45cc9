"""Maxima and sums of rows in registers, where four lanes have the elements of a row.

Lanes exchange values only where they must: the maximum of all four is computed where one of them
saw more than the slack allows, and each lane keeps its own sum until a partial result ends.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.registers import (
    LAYOUT,
    ROW,
    SCALAR,
    arith,
    asm,
    constant,
    element,
    i32,
    like,
    llvm,
    on_registers,
    other_lane,
    packed,
    scf,
    tile_registers,
    vector,
)
from ejkernel.kernels.pallas.gpu.common.warps import any_in_warp


def _reduce_rows(x: Any, combine: Any) -> list[Any]:
    """Returns the reduction of a lane's elements of each of its two rows."""
    results = []
    for half in range(2):
        pairs = [register.pair for register in tile_registers(x) if register.half == half]
        both = functools.reduce(combine, pairs)
        results.append(combine(element(both, 0), element(both, 1)))
    return results


def _pack_rows(like_this: Any, values: list[Any]) -> Any:
    """Returns values of the two rows as an array in the layout of ``like_this``."""
    registers = np.empty_like(like_this.registers)
    kind = like_this.registers.flat[0].type
    registers.flat = [vector.broadcast(kind, x) for x in values]
    return like(like_this, registers)


def lane_sums(
    x: jax.Array, rows: jax.Array, factors: jax.Array | None, *, keep_here: bool = False
) -> jax.Array:
    """Returns ``rows * factors`` plus this lane's elements of the rows of ``x``; None: factors 1.

    ``keep_here``: the compiler may not move the additions to where the sums are used, such as
    behind a wait for matmuls.
    """

    optional = () if factors is None else (factors,)

    @on_registers(rows, ROW, LAYOUT, *(ROW for _ in optional))
    def apply(rows: Any, x: Any, *factors: Any) -> Any:
        sums = _reduce_rows(x, arith.addf)
        new = [element(r, 0) for r in rows.registers.flat]
        if factors:
            by = [element(r, 0) for r in factors[0].registers.flat]
            new = [llvm.intr_fma(o, f, s) for o, f, s in zip(new, by, sums, strict=True)]
        else:
            new = [arith.addf(o, s) for o, s in zip(new, sums, strict=True)]
        if keep_here:
            new = [asm("mov.f32 $0, $1;", "=f,f", x.type, x) for x in new]
        return _pack_rows(rows, new)

    return apply(rows, x, *optional)


def sum_over_lanes(rows: jax.Array) -> jax.Array:
    """Returns the sums of rows from the sums of lanes."""

    @on_registers(rows, ROW)
    def apply(rows: Any) -> Any:
        results = []
        for x in (element(r, 0) for r in rows.registers.flat):
            for distance in (1, 2):
                x = arith.addf(x, other_lane(x, distance))
            results.append(x)
        return _pack_rows(rows, results)

    return apply(rows)


def raise_maxima(m: jax.Array, x: jax.Array, slack: float | jax.Array) -> jax.Array:
    """Returns maxima ``m`` of rows, raised where ``x`` is more than ``slack`` above."""
    traced = () if isinstance(slack, float) else (slack,)

    @on_registers(m, ROW, LAYOUT, *(SCALAR for _ in traced))
    def apply(m: Any, x: Any, *scalars: Any) -> Any:
        old = [element(r, 0) for r in m.registers.flat]
        allowed = scalars[0].registers.item() if isinstance(slack, jax.Array) else constant(slack)
        limit = [arith.addf(o, allowed) for o in old]
        seen = _reduce_rows(x, arith.maxnumf)
        above = arith.CmpFPredicate.OGT
        over = [arith.cmpf(above, a, b) for a, b in zip(seen, limit, strict=True)]
        branch = scf.IfOp(any_in_warp(over), [o.type for o in old], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            new = []
            for top, o, most in zip(seen, old, limit, strict=True):
                for distance in (1, 2):
                    top = arith.maxnumf(top, other_lane(top, distance))
                new.append(arith.select(arith.cmpf(above, top, most), top, o))
            scf.yield_(new)
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(old)
        return _pack_rows(m, list(branch.results))

    return apply(m, x, *traced)


def to_16_bit(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``x`` as float16 or bfloat16, converted here: a later conversion would keep twice the
    registers."""
    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=kind)
    def apply(_: Any, x: Any) -> Any:
        pair_type = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype))
        out = np.empty_like(x.registers)
        for at, pair in np.ndenumerate(x.registers):
            out[at] = llvm.bitcast(pair_type, packed(element(pair, 0), element(pair, 1), dtype))
        return like(x, out)

    return apply(x)


def set_flag_if_any(flags: Any, line: jax.Array, bit: jax.Array, rows: jax.Array) -> None:
    """Sets a bit of a line of ``flags``, int32 words in shared memory, if a row of this warp is
    not 0.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, ROW))
    def apply(_: Any, flags: Any, line: Any, bit: Any, rows: Any) -> None:
        values = [element(r, 0) for r in rows.registers.flat]
        tests = [arith.cmpf(arith.CmpFPredicate.UNE, x, constant(0.0)) for x in values]
        is_any = arith.extui(i32(), any_in_warp(tests))
        line, bit = line.registers.item(), bit.registers.item()
        (_, words) = ir.MemRefType(flags.type).shape
        word = arith.addi(arith.muli(line, constant(words)), arith.shrui(bit, constant(5)))
        start = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(flags))
        address = arith.addi(start, arith.shli(word, constant(2)))
        mask = arith.shli(constant(1), arith.andi(bit, constant(31)))
        text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; @p red.shared.or.b32 [$0], $2; }"
        asm(text, "r,r,r", None, address, is_any, mask)

    apply(flags, line, bit, rows)
