"""Element masks of tiles of logits, in the registers of one warpgroup."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.registers import (
    COLUMN,
    LAYOUT,
    ROW,
    SCALAR,
    arith,
    compare,
    constant,
    element,
    like,
    on_registers,
    read,
    spread,
    thread,
    thread_place,
    tile_registers,
    vector,
)
from ejkernel.types.masks.structure import Band


def row_of(ref: Any, *indices: Any) -> tuple[Any, ...]:
    """Returns the indices of these rows in an array ``[#b, #h, ...]``: 0 on axes of size 1."""
    return tuple(n if size > 1 else 0 for n, size in zip(indices, ref.shape, strict=False))


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
    query c; key minus query of the first element is ``distance``. Rows at and after ``rows_left``,
    or columns at and after ``columns_left``, are past the end.

    Positions come from the thread index, read again here, and are compared with constants: as
    arrays of the language they would be hoisted out of the mainloop, one register per column.
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
        out = np.empty_like(x.registers)
        for register in tile_registers(x):
            pair, r, c = register.pair, register.row, register.column
            for e in range(2):
                value = element(pair, e)
                shift = sign * (c + e - r)  # of this element's distance from the first's
                tests = []
                if band.lo is not None:
                    tests.append(("sge", base, constant(band.lo - shift)))
                if band.hi is not None:
                    tests.append(("sle", base, constant(band.hi - shift)))
                if checks_rows or checks_columns:
                    position, offset = (row, r) if checks_rows else (column, c + e)
                    end = arith.subi(left.registers.item(), constant(offset))
                    tests.append(("slt", position, end))
                for test in tests:
                    value = arith.select(compare(*test), value, hidden)
                pair = vector.insert(
                    value, pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e])
                )
            out[register.index] = pair
        return like(x, out)

    return apply(x, jnp.int32(distance), jnp.int32(left))


def hide_unset(x: jax.Array, bits: Any, fill: float = -np.inf) -> jax.Array:
    """``fill`` where a bit of ``bits`` is not set.

    A byte for each warp's 16 rows, a bit of it for each 16 columns: int32 for 64 rows.
    """

    @on_registers(x, LAYOUT, SCALAR)
    def apply(x: Any, bits: Any) -> Any:
        # 8 times the warp's index
        first = arith.andi(arith.shrui(thread(), constant(2)), constant(24))
        mine = arith.shrui(bits.registers.item(), first)
        hidden = vector.broadcast(x.registers.flat[0].type, constant(fill))
        tests = []
        for n in range(-(-x.shape[1] // 16)):
            bit = arith.andi(mine, constant(1 << n))
            tests.append(compare("ne", bit, constant(0)))
        out = np.empty_like(x.registers)
        for index, pair, _, eight in tile_registers(x):
            out[index] = arith.select(tests[eight // 2], pair, hidden)
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
