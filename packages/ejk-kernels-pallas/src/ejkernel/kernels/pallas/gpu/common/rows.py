"""Arithmetic of a tile and numbers of its rows, in the registers of one warpgroup."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import scf as _scf
from jaxlib.mlir.dialects import vector as _vector

from ejkernel.kernels.pallas.gpu.common.masks import LAYOUT, ROW, SCALAR, thread_place

# the compiler's own operations, whose stubs are stricter than they are
arith: Any = _arith
llvm: Any = _llvm
scf: Any = _scf
vector: Any = _vector


def scale_rows(x: jax.Array, factors: jax.Array) -> jax.Array:
    """``x * factors[:, None]`` of float32 ``x`` in the layout of products.

    A warp whose rows all have the factor 1 leaves them alone: one vote instead of a multiplication
    a register.
    """

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, ROW),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=LAYOUT),
    )
    def apply(_: Any, x: Any, factors: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
        zero = ir.DenseI64ArrayAttr.get([0])
        rows = [
            vector.extract(r, dynamic_position=[], static_position=zero)
            for r in factors.registers.flat
        ]
        differ = [arith.cmpf(arith.CmpFPredicate.UNE, row, one) for row in rows]
        some = arith.extui(i32, arith.ori(*differ))
        some = llvm.inline_asm(
            i32,
            [some],
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
            " selp.u32 $0, 1, 0, p; }",
            "=r,r",
            has_side_effects=True,
        )
        some = arith.cmpi(
            arith.CmpIPredicate.ne, some, arith.constant(i32, ir.IntegerAttr.get(i32, 0))
        )
        old = list(x.registers.flat)
        branch = scf.IfOp(some, [r.type for r in old], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            new = []
            at: Any
            for at, pair in np.ndenumerate(x.registers):
                row = vector.broadcast(old[0].type, rows[at[4]])
                new.append(arith.mulf(pair, row))
            scf.yield_(new)
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(old)
        out = np.empty_like(x.registers)
        for index, value in zip(np.ndindex(out.shape), branch.results, strict=True):
            out[index] = value
        return mgpu.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return apply(x, factors)


def multiply_add(x: jax.Array, factors: jax.Array, terms: jax.Array) -> jax.Array:
    """``x * factors + terms``, float32, rounded once: what no compiler fuses or parts otherwise.

    x is a tile in the layout of products, or rows; the others are rows.
    """
    tile = x.ndim == 2
    layout = LAYOUT if tile else ROW

    @plgpu.inline_mgpu(
        arg_types=(layout, ROW, ROW),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def apply(_: Any, x: Any, factors: Any, terms: Any) -> Any:
        zero = ir.DenseI64ArrayAttr.get([0])
        kind = x.registers.flat[0].type

        def spread(rows: Any) -> list[Any]:
            if not tile:
                return list(rows.registers.flat)
            out = [
                vector.extract(r, dynamic_position=[], static_position=zero)
                for r in rows.registers.flat
            ]
            return [vector.broadcast(kind, r) for r in out]

        a, b = spread(factors), spread(terms)
        out = np.empty_like(x.registers)
        at: Any
        for n, (at, value) in enumerate(np.ndenumerate(x.registers)):
            row = at[4] if tile else n
            out[at] = llvm.intr_fma(value, a[row], b[row])
        return mgpu.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return apply(x, factors, terms)


def store_rows(ref: Any, x: jax.Array, place: tuple[Any, ...], first: Any, last: Any) -> None:
    """Rows ``first`` .. ``last`` of tile ``x``, in the layout of products, to global memory.

    ``place`` is that of the tile's first element in ``ref [batch, rows, heads, columns]``: (batch,
    row, head, column). Each thread stores what it has: for ends of tiles, not for whole ones.
    """
    scalars = tuple(jnp.int32(n) for n in (*place, first, last))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, *(SCALAR,) * len(scalars)))
    def apply(_: Any, ref: Any, x: Any, *scalars: Any) -> None:
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        batch, top, head, column, first, last = (s.registers.item() for s in scalars)

        def const(n: int) -> Any:
            return arith.constant(i32, ir.IntegerAttr.get(i32, n))

        def at(*numbers: Any) -> list[Any]:
            return [arith.index_cast(index, n) for n in numbers]

        row, pair_column = thread_place()
        compare = arith.CmpIPredicate
        for place, pair in np.ndenumerate(x.registers):
            # as in ``hide_outside``: eight columns, and the upper or lower eight of sixteen rows
            mine = arith.addi(row, const(8 * place[4]))
            c = arith.addi(arith.addi(column, pair_column), const(8 * place[1]))
            inside = arith.andi(
                arith.cmpi(compare.sge, mine, first), arith.cmpi(compare.slt, mine, last)
            )
            branch = scf.IfOp(inside)
            with ir.InsertionPoint(branch.then_block):
                vector.store(pair, ref, at(batch, arith.addi(top, mine), head, c))
                scf.yield_([])

    apply(ref, x, *scalars)
