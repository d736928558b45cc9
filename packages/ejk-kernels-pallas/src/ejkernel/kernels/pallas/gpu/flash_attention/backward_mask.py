"""Masks of one warpgroup's tile of logits, key rows by query columns."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ejkernel.types.structure import Band

LAYOUT = plgpu.Layout.WGMMA
ALONG_Q, ALONG_KV = LAYOUT.reduce(0), LAYOUT.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
# JAX before 0.11 asks for an index beside the reference
_IDX = inspect.signature(plgpu.load).parameters["idx"]
_WHOLE = ((),) if _IDX.default is inspect.Parameter.empty else ()


def read(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """The values of a reference in a register layout."""
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=optimized)


def hide_outside(
    x: jax.Array,
    band: Band,
    distance: Any,
    rows_left: Any | None = None,
    columns_left: Any | None = None,
) -> jax.Array:
    """-inf where the band or the end of the keys hides a pair.

    An element at (row r, column c) has key minus query ``distance + r - c``; rows from
    ``rows_left`` on, or columns from ``columns_left`` on, are past the end. Positions come from
    the thread index read anew: as values of the language they would be hoisted out of the walk
    and hold a register for each column.
    """
    checks_rows, checks_columns = rows_left is not None, columns_left is not None
    left = rows_left if checks_rows else columns_left if checks_columns else 0
    scalars = (jnp.int32(distance), jnp.int32(left))

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=LAYOUT),
    )
    def apply(_: Any, x: Any, distance: Any, left: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def const(n: int) -> Any:
            return arith.constant(i32, ir.IntegerAttr.get(i32, n))

        thread = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)
        warp = arith.andi(arith.shrui(thread, const(5)), const(3))
        lane = arith.andi(thread, const(31))
        row = arith.addi(arith.shli(warp, const(4)), arith.shrui(lane, const(2)))
        column = arith.shli(arith.andi(lane, const(3)), const(1))
        base = arith.addi(distance.registers.item(), arith.subi(row, column))
        hidden = arith.constant(f32, ir.FloatAttr.get(f32, -np.inf))
        compare = arith.CmpIPredicate
        out = np.empty_like(x.registers)
        # a register holds two columns of a row; its index: eight columns, and the upper or
        # lower eight of sixteen rows
        for index, pair in np.ndenumerate(x.registers):
            r, c = 8 * index[4], 8 * index[1]
            for e in range(2):
                value = vector.extract(
                    pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e])
                )
                tests = []
                if band.lo is not None:
                    tests.append((compare.sge, base, const(band.lo - r + c + e)))
                if band.hi is not None:
                    tests.append((compare.sle, base, const(band.hi - r + c + e)))
                if checks_rows:
                    tests.append((compare.slt, row, arith.subi(left.registers.item(), const(r))))
                elif checks_columns:
                    end = arith.subi(left.registers.item(), const(c + e))
                    tests.append((compare.slt, column, end))
                for test in tests:
                    value = arith.select(arith.cmpi(*test), value, hidden)
                pair = vector.insert(
                    value, pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e])
                )
            out[index] = pair
        return mgpu.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return apply(x, *scalars)


def hide_other_segments(x: jax.Array, q_ids: Any, kv_ids: Any) -> jax.Array:
    """-inf where the ids of a query (column) and a key (row) differ; ids are references."""
    q_id = read(q_ids, ALONG_Q, optimized=False)
    kv_id = read(kv_ids, ALONG_KV, optimized=False)
    rows, columns = (
        lax.broadcast_in_dim(i, x.shape, (axis,)) for i, axis in ((kv_id, 0), (q_id, 1))
    )
    return jnp.where(rows == columns, x, -jnp.inf)
