"""Arithmetic of a tile and of values per row, in the registers of one warpgroup."""

from __future__ import annotations

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
    address,
    arith,
    asm,
    compare,
    constant,
    element,
    i32,
    indices,
    like,
    llvm,
    on_registers,
    scf,
    thread,
    thread_place,
    tile_registers,
    vector,
    when,
)
from ejkernel.kernels.pallas.gpu.common.tma import COPY_ROWS
from ejkernel.kernels.pallas.gpu.common.warps import any_in_warp


def scale_rows(x: jax.Array, factors: jax.Array, *, clear: bool = False) -> jax.Array:
    """``x * factors[:, None]`` of float32 ``x`` in the layout of matmuls.

    A warp whose rows all have the factor 1 leaves them unchanged: one vote instead of a
    multiplication a register. ``clear``: the factor 0 makes everything 0, NaN too.
    """

    @on_registers(x, LAYOUT, ROW)
    def apply(x: Any, factors: Any) -> Any:
        unchanged, zero = constant(1.0), constant(0.0)
        rows = [element(r, 0) for r in factors.registers.flat]
        differ = [arith.cmpf(arith.CmpFPredicate.UNE, row, unchanged) for row in rows]
        old = list(x.registers.flat)
        branch = scf.IfOp(any_in_warp(differ), [r.type for r in old], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            new = []
            kind = old[0].type
            nothing = vector.broadcast(kind, zero)
            ends = [arith.cmpf(arith.CmpFPredicate.OEQ, row, zero) for row in rows]
            for _, pair, half, _ in tile_registers(x):
                pair = arith.mulf(pair, vector.broadcast(kind, rows[half]))
                new.append(arith.select(ends[half], nothing, pair) if clear else pair)
            scf.yield_(new)
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(old)
        out = np.empty_like(x.registers)
        out.flat = list(branch.results)
        return like(x, out)

    return apply(x, factors)


def only_first(x: jax.Array, count: int, other: float) -> jax.Array:
    """Returns the first ``count`` values per row, and ``other`` for the following rows."""

    @on_registers(x, ROW)
    def apply(x: Any) -> Any:
        first, _ = thread_place()
        out = np.empty_like(x.registers)
        for n, at in enumerate(np.ndindex(x.registers.shape)):
            value = x.registers[at]
            row = arith.addi(first, constant(8 * n))  # as in ``TileRegister``
            inside = compare("slt", row, constant(count))
            out[at] = arith.select(inside, value, vector.broadcast(value.type, constant(other)))
        return like(x, out)

    return apply(x)


def multiply_add(x: jax.Array, factors: jax.Array, terms: jax.Array) -> jax.Array:
    """``x * factors + terms``, float32, rounded once: no compiler fuses or splits it differently.

    x is a tile in the layout of matmuls, or rows; the others are rows.
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


def store_row_range(
    ref: Any, x: jax.Array, origin: tuple[Any, ...], first: Any, last: Any, *, heads: bool = False
) -> None:
    """Stores rows ``first`` .. ``last`` of tile ``x``, in the layout of matmuls, to global memory.

    ``origin`` is the index of the tile's first element in ``ref [batch, rows, heads, columns]``:
    (batch, row, head, column); ``heads``: its rows are heads of one row. Each thread stores its own
    elements: for partial tiles, not for full ones.
    """
    scalars = tuple(jnp.int32(n) for n in (*origin, first, last))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, *(SCALAR,) * len(scalars)))
    def apply(_: Any, ref: Any, x: Any, *scalars: Any) -> None:
        batch, top, head, column, first, last = (s.registers.item() for s in scalars)

        row, pair_column = thread_place()
        for register in tile_registers(x):
            mine = arith.addi(row, constant(register.row))
            c = arith.addi(arith.addi(column, pair_column), constant(register.column))
            with when(arith.andi(compare("sge", mine, first), compare("slt", mine, last))):
                row_head = (top, arith.addi(head, mine)) if heads else (arith.addi(top, mine), head)
                vector.store(register.pair, ref, indices(batch, *row_head, c))

    apply(ref, x, *scalars)


def clear_rows(ref: Any, first: Any, last: Any) -> None:
    """Sets rows of ``ref`` before ``first``, and at and after ``last``, to 0, even if they are NaN.

    ref ``[rows, columns]``, 16 bits each, has the layout of ``tiled``: a row is full lines of 128
    bytes, however their words are permuted. Columns are a multiple of 128. The warpgroup writes
    only the cleared rows, and reads nothing.
    """
    rows, columns = ref.shape
    kind = plgpu.RefType((plgpu.TilingTransform((COPY_ROWS, 64)), plgpu.SwizzleTransform(128)))

    @plgpu.inline_mgpu(arg_types=(kind, SCALAR, SCALAR))
    def apply(_: Any, ref: Any, *ends: Any) -> None:
        first, last = (n.registers.item() for n in ends)
        number = arith.andi(thread(), constant(127))
        row = arith.andi(arith.shrui(number, constant(3)), constant(COPY_ROWS - 1))
        start = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))
        start = arith.addi(start, arith.muli(number, constant(16)))
        group = 2 * COPY_ROWS * columns  # bytes
        for n in range(rows // COPY_ROWS):
            mine = arith.addi(row, constant(n * COPY_ROWS))
            outside = arith.ori(compare("slt", mine, first), compare("sge", mine, last))
            stores = "".join(
                f" @p st.shared.v4.b32 [$0+{offset}], {{z, z, z, z}};"
                for offset in range(n * group, (n + 1) * group, 128 * 16)
            )
            text = (
                "{ .reg .pred p; .reg .b32 z; mov.b32 z, 0; setp.ne.b32 p, $1, 0;" + stores + " }"
            )
            asm(text, "r,r", None, start, arith.extui(i32(), outside))

    apply(ref, jnp.int32(first), jnp.int32(last))


def store_tile(ref: Any, x: jax.Array) -> None:
    """Stores float32 tile ``x``, in the layout of matmuls, to device memory.

    ref: of x's shape, rows of a larger array. One address a thread and constant offsets: where
    accumulators fill the registers, an address per element would spill.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def apply(_: Any, ref: Any, x: Any) -> None:
        start, pitch = address(ref, *thread_place())
        for register in tile_registers(x):
            pair, offset = register.pair, register.row * pitch + register.column * 4
            text = f"st.global.v2.f32 [$0+{offset}], {{$1, $2}};"
            asm(text, "l,f,f", None, start, element(pair, 0), element(pair, 1))

    apply(ref, x)
