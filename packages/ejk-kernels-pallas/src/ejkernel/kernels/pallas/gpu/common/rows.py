"""Arithmetic of a tile and numbers of its rows, in the registers of one warpgroup."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.masks import (
    LAYOUT,
    ROW,
    SCALAR,
    arith,
    constant,
    element,
    i32,
    like,
    llvm,
    on_registers,
    scf,
    thread,
    thread_place,
    vector,
)  # fmt: skip
from ejkernel.kernels.pallas.gpu.common.tma import GROUP
from ejkernel.kernels.pallas.gpu.common.warps import any_in_warp


def scale_rows(x: jax.Array, factors: jax.Array, *, clear: bool = False) -> jax.Array:
    """``x * factors[:, None]`` of float32 ``x`` in the layout of products.

    A warp whose rows all have the factor 1 leaves them alone: one vote instead of a multiplication
    a register. ``clear``: the factor 0 makes everything 0, NaN too.
    """

    @on_registers(x, LAYOUT, ROW)
    def apply(x: Any, factors: Any) -> Any:
        one, none = constant(1.0), constant(0.0)
        rows = [element(r, 0) for r in factors.registers.flat]
        differ = [arith.cmpf(arith.CmpFPredicate.UNE, row, one) for row in rows]
        old = list(x.registers.flat)
        branch = scf.IfOp(any_in_warp(differ), [r.type for r in old], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            new = []
            kind = old[0].type
            nothing = vector.broadcast(kind, none)
            ends = [arith.cmpf(arith.CmpFPredicate.OEQ, row, none) for row in rows]
            at: Any
            for at, pair in np.ndenumerate(x.registers):
                pair = arith.mulf(pair, vector.broadcast(kind, rows[at[4]]))
                new.append(arith.select(ends[at[4]], nothing, pair) if clear else pair)
            scf.yield_(new)
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(old)
        out = np.empty_like(x.registers)
        out.flat = list(branch.results)
        return like(x, out)

    return apply(x, factors)


def multiply_add(x: jax.Array, factors: jax.Array, terms: jax.Array) -> jax.Array:
    """``x * factors + terms``, float32, rounded once: what no compiler fuses or parts otherwise.

    x is a tile in the layout of products, or rows; the others are rows.
    """
    tile = x.ndim == 2

    @on_registers(x, LAYOUT if tile else ROW, ROW, ROW)
    def apply(x: Any, factors: Any, terms: Any) -> Any:
        kind = x.registers.flat[0].type

        def spread(rows: Any) -> list[Any]:
            if not tile:
                return list(rows.registers.flat)
            out = [element(r, 0) for r in rows.registers.flat]
            return [vector.broadcast(kind, r) for r in out]

        a, b = spread(factors), spread(terms)
        out = np.empty_like(x.registers)
        at: Any
        for n, (at, value) in enumerate(np.ndenumerate(x.registers)):
            row = at[4] if tile else n
            out[at] = llvm.intr_fma(value, a[row], b[row])
        return like(x, out)

    return apply(x, factors, terms)


def store_rows(
    ref: Any, x: jax.Array, place: tuple[Any, ...], first: Any, last: Any, *, heads: bool = False
) -> None:
    """Rows ``first`` .. ``last`` of tile ``x``, in the layout of products, to global memory.

    ``place`` is that of the tile's first element in ``ref [batch, rows, heads, columns]``: (batch,
    row, head, column); ``heads``: its rows are heads of one row. Each thread stores what it has:
    for ends of tiles, not for whole ones.
    """
    scalars = tuple(jnp.int32(n) for n in (*place, first, last))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, *(SCALAR,) * len(scalars)))
    def apply(_: Any, ref: Any, x: Any, *scalars: Any) -> None:
        batch, top, head, column, first, last = (s.registers.item() for s in scalars)

        def at(*numbers: Any) -> list[Any]:
            return [arith.index_cast(ir.IndexType.get(), n) for n in numbers]

        row, pair_column = thread_place()
        compare = arith.CmpIPredicate
        for place, pair in np.ndenumerate(x.registers):
            # as in ``hide_outside``: eight columns, and the upper or lower eight of sixteen rows
            mine = arith.addi(row, constant(8 * place[4]))
            c = arith.addi(arith.addi(column, pair_column), constant(8 * place[1]))
            inside = arith.andi(
                arith.cmpi(compare.sge, mine, first), arith.cmpi(compare.slt, mine, last)
            )
            branch = scf.IfOp(inside)
            with ir.InsertionPoint(branch.then_block):
                here = (top, arith.addi(head, mine)) if heads else (arith.addi(top, mine), head)
                vector.store(pair, ref, at(batch, *here, c))
                scf.yield_([])

    apply(ref, x, *scalars)


def clear_rows(ref: Any, slot: Any, first: Any, last: Any) -> None:
    """Rows of ``ref[slot]`` before ``first`` and from ``last`` on to 0, whatever they were.

    ref ``[slots, rows, columns]``, 16 bits each, lies as ``tiled`` says: a row is whole lines of
    128 bytes, however their words are permuted. Columns are a multiple of 128. The warpgroup writes
    only what becomes 0, and reads nothing.
    """
    _, rows, columns = ref.shape
    kind = plgpu.RefType((plgpu.TilingTransform((GROUP, 64)), plgpu.SwizzleTransform(128)))

    @plgpu.inline_mgpu(arg_types=(kind, SCALAR, SCALAR, SCALAR))
    def apply(_: Any, ref: Any, *scalars: Any) -> None:
        slot, first, last = (s.registers.item() for s in scalars)
        number = arith.andi(thread(), constant(127))
        row = arith.andi(arith.shrui(number, constant(3)), constant(GROUP - 1))
        start = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))
        place = arith.muli(slot, constant(2 * rows * columns))
        start = arith.addi(start, arith.addi(place, arith.muli(number, constant(16))))
        compare = arith.CmpIPredicate
        group = 2 * GROUP * columns  # bytes
        for n in range(rows // GROUP):
            mine = arith.addi(row, constant(n * GROUP))
            before = arith.cmpi(compare.slt, mine, first)
            behind = arith.cmpi(compare.sge, mine, last)
            stores = "".join(
                f" @p st.shared.v4.b32 [$0+{offset}], {{z, z, z, z}};"
                for offset in range(n * group, (n + 1) * group, 128 * 16)
            )
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [start, arith.extui(i32(), arith.ori(before, behind))],
                "{ .reg .pred p; .reg .b32 z; mov.b32 z, 0; setp.ne.b32 p, $1, 0;" + stores + " }",
                "r,r", has_side_effects=True,
            )  # fmt: skip

    apply(ref, *(jnp.int32(n) for n in (slot, first, last)))


def store_tile(ref: Any, x: jax.Array) -> None:
    """Float32 tile ``x``, in the layout of products, to device memory.

    ref: of x's shape, rows of a larger array. One address a thread and constants: where sums fill
    the registers, an address of every element would not find room.
    """
    itemsize = jnp.dtype(jnp.float32).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def apply(_: Any, ref: Any, x: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        row, column = thread_place()
        mine = arith.addi(arith.muli(row, constant(stride)), column)
        mine = arith.extui(i64, arith.muli(mine, constant(itemsize)))
        start = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
        base = arith.addi(start, mine)
        for at, pair in np.ndenumerate(x.registers):
            # as in ``hide_outside``: eight columns, and the upper or lower eight of sixteen rows
            offset = itemsize * (8 * at[4] * stride + 8 * at[1])
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [base, element(pair, 0), element(pair, 1)],
                f"st.global.v2.f32 [$0+{offset}], {{$1, $2}};", "l,f,f", has_side_effects=True,
            )  # fmt: skip

    apply(ref, x)
