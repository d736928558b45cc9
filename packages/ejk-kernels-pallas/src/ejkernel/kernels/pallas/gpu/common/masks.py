"""Tiles of logits in the registers of one warpgroup: how they lie there, and element masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import scf as _scf
from jaxlib.mlir.dialects import vector as _vector

from ejkernel.kernels.pallas import compat
from ejkernel.types.structure import Band

# the compiler's own operations, whose stubs are stricter than they are
arith: Any = _arith
llvm: Any = _llvm
scf: Any = _scf
vector: Any = _vector

LAYOUT = plgpu.Layout.WGMMA
ROW, COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)
SCALAR = plgpu.Layout.WG_SPLAT(())


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def constant(n: float) -> Any:
    """An int as int32, a float as float32."""
    if isinstance(n, int):
        return arith.constant(i32(), ir.IntegerAttr.get(i32(), n))
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), n))


def thread() -> Any:
    """The thread's number, read anew: two of them are not known to be equal."""
    return llvm.inline_asm(i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)


def element(x: Any, at: int) -> Any:
    """One number of a register that holds several."""
    place = ir.DenseI64ArrayAttr.get([at])
    return vector.extract(x, dynamic_position=[], static_position=place)


def like(x: Any, registers: Any) -> Any:
    """Other registers as an array in the layout of ``x``."""
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def on_registers(x: jax.Array, *layouts: Any) -> Callable:
    """Makes a function of ``x`` and others, in these layouts, one of their registers.

    It gives float32 numbers in the shape and layout of ``x``.
    """
    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layouts[0])
    made = plgpu.inline_mgpu(arg_types=layouts, return_type=kind)
    return lambda function: made(lambda _, *given: function(*given))


def read(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """The values of a reference in a register layout."""
    return compat.load_registers(ref, layout=layout, optimized=optimized)


def row_of(ref: Any, *numbers: Any) -> tuple[Any, ...]:
    """Where an array ``[#b, #h, ...]`` has what it says of these rows: 0 where one serves all."""
    return tuple(n if size > 1 else 0 for n, size in zip(numbers, ref.shape, strict=False))


def spread(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A vector along one axis of a tile, the same along the other."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def thread_place() -> tuple[Any, Any]:
    """Row and column of a thread's first element of a tile, from the thread index read anew."""
    number = thread()
    warp = arith.andi(arith.shrui(number, constant(5)), constant(3))
    lane = arith.andi(number, constant(31))
    row = arith.addi(arith.shli(warp, constant(4)), arith.shrui(lane, constant(2)))
    return row, arith.shli(arith.andi(lane, constant(3)), constant(1))


def hide_outside(
    x: jax.Array,
    band: Band,
    distance: Any,
    *,
    rows_left: Any | None = None,
    columns_left: Any | None = None,
    transposed: bool = False,
    fill: float = -np.inf,
) -> jax.Array:
    """``fill`` where the band or the end of the keys hides a pair.

    An element at (row r, column c) is the pair of query r and key c, ``transposed`` of key r and
    query c; key minus query of the first element is ``distance``. Rows from ``rows_left`` on, or
    columns from ``columns_left`` on, are past the end.

    Positions come from the thread index read anew, and are compared with constants: as arrays of
    the language they would be hoisted out of the walk and hold a register for each column.
    """
    checks_rows, checks_columns = rows_left is not None, columns_left is not None
    left = rows_left if checks_rows else columns_left if checks_columns else 0
    sign = -1 if transposed else 1

    @on_registers(x, LAYOUT, SCALAR, SCALAR)
    def apply(x: Any, distance: Any, left: Any) -> Any:
        row, column = thread_place()
        key, query = (row, column) if transposed else (column, row)
        base = arith.addi(distance.registers.item(), arith.subi(key, query))
        hidden = constant(fill)
        compare = arith.CmpIPredicate
        out = np.empty_like(x.registers)
        # a register holds two columns of a row; its index: eight columns, and the upper or
        # lower eight of sixteen rows
        for index, pair in np.ndenumerate(x.registers):
            r, c = 8 * index[4], 8 * index[1]
            for e in range(2):
                value = element(pair, e)
                shift = sign * (c + e - r)  # of this element's distance from the first's
                tests = []
                if band.lo is not None:
                    tests.append((compare.sge, base, constant(band.lo - shift)))
                if band.hi is not None:
                    tests.append((compare.sle, base, constant(band.hi - shift)))
                if checks_rows or checks_columns:
                    place, offset = (row, r) if checks_rows else (column, c + e)
                    end = arith.subi(left.registers.item(), constant(offset))
                    tests.append((compare.slt, place, end))
                for test in tests:
                    value = arith.select(arith.cmpi(*test), value, hidden)
                pair = vector.insert(
                    value, pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e])
                )
            out[index] = pair
        return like(x, out)

    return apply(x, jnp.int32(distance), jnp.int32(left))


def hide_unset(x: jax.Array, bits: Any, fill: float = -np.inf) -> jax.Array:
    """``fill`` where a bit of ``bits`` is not set.

    A byte for each warp's 16 rows, a bit of it for each 16 columns: int32 for 64 rows.
    """

    @on_registers(x, LAYOUT, SCALAR)
    def apply(x: Any, bits: Any) -> Any:
        # 8 times the warp's number
        first = arith.andi(arith.shrui(thread(), constant(2)), constant(24))
        mine = arith.shrui(bits.registers.item(), first)
        hidden = vector.broadcast(x.registers.flat[0].type, constant(fill))
        tests = []
        for n in range(-(-x.shape[1] // 16)):
            bit = arith.andi(mine, constant(1 << n))
            tests.append(arith.cmpi(arith.CmpIPredicate.ne, bit, constant(0)))
        out = np.empty_like(x.registers)
        at: Any
        for at, pair in np.ndenumerate(x.registers):
            out[at] = arith.select(tests[at[1] // 2], pair, hidden)
        return like(x, out)

    return apply(x, jnp.int32(bits))


def hide_other_segments(
    x: jax.Array, row_ids: Any, column_ids: Any, fill: float = -np.inf
) -> jax.Array:
    """``fill`` where the ids of a row and of a column differ; ids are references."""
    rows, columns = (
        spread(read(ids, layout, optimized=False), x.shape, axis)
        for ids, layout, axis in ((row_ids, ROW, 0), (column_ids, COLUMN, 1))
    )
    return jnp.where(rows == columns, x, fill)
