"""Rows of device memory to and from the registers of products, 16 bytes a lane.

In those registers the four lanes of a quad have two neighbouring columns of every eight each. Lanes
that read and write just these ask for four and eight bytes at a time, and what limits them is how
many rows they touch. Here a lane reads or writes columns that follow each other, and the quad
exchanges them.
"""

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
    llvm,
    thread,
    thread_place,
)
from ejkernel.kernels.pallas.gpu.common.tma import GROUP

TILE_BYTES = 128  # of a row, in one tile of shared memory


def _bit(which: int) -> Any:
    """Whether this lane's number has a bit."""
    bit = arith.andi(thread(), constant(which))
    return arith.cmpi(arith.CmpIPredicate.ne, bit, constant(0))


def _exchanged(bit: Any, distance: int, a: Any, b: Any) -> tuple[Any, Any]:
    """(a, the other's a) in the lane without the bit, (the other's b, b) in the one with it."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
    given = arith.select(bit, a, b)
    got = llvm.inline_asm(i32(), [given], text, "=r,r", has_side_effects=True)
    return arith.select(bit, got, a), arith.select(bit, b, got)


def _transposed(odd: Any, upper: Any, words: list[Any]) -> list[Any]:
    """Word i of lane j is word j of lane i."""
    w = list(words)
    w[0], w[1] = _exchanged(odd, 1, w[0], w[1])
    w[2], w[3] = _exchanged(odd, 1, w[2], w[3])
    w[0], w[2] = _exchanged(upper, 2, w[0], w[2])
    w[1], w[3] = _exchanged(upper, 2, w[1], w[3])
    return w


def _start(ref: Any, itemsize: int, column: Any) -> tuple[Any, int]:
    """(address of this thread's first row at ``column``, bytes from a row to the next)."""
    i64 = ir.IntegerType.get_signless(64)
    (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
    row, _ = thread_place()
    mine = arith.addi(arith.muli(row, constant(stride)), column)
    mine = arith.extui(i64, arith.muli(mine, constant(itemsize)))
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), mine), stride * itemsize


def load_rows(ref: Any) -> jax.Array:
    """The 64 rows of ``ref``, of 16-bit numbers, as an operand of products."""
    kind = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=LAYOUT)
    groups = ref.shape[1] // 8

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)
    def apply(_: Any, ref: Any) -> Any:
        _, column = thread_place()
        start, row = _start(ref, 2, arith.muli(column, constant(4)))
        four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        found = {}
        for group in range(0, groups, 4):
            for half in range(2):
                text = f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{half * 8 * row + group * 16}];"
                found[group, half] = llvm.inline_asm(
                    four, [start], text, "=r,=r,=r,=r,l", has_side_effects=True
                )
        odd, upper = _bit(1), _bit(2)
        number = ir.MemRefType(ref.type).element_type
        pair = ir.VectorType.get((2,), number)
        registers = np.empty(LAYOUT.to_mgpu().registers_shape((64, groups * 8)), dtype=object)
        for (group, half), words in found.items():
            words = [llvm.extractvalue(i32(), words, [i]) for i in range(4)]
            for i, word in enumerate(_transposed(odd, upper, words)):
                at = [0] * registers.ndim
                at[1], at[4] = group + i, half
                registers[tuple(at)] = llvm.bitcast(pair, word)
        return mgpu.FragmentedArray(_registers=registers, _layout=LAYOUT.to_mgpu(), _is_signed=None)

    return apply(ref)


def clear_rows(ref: Any, first: jax.Array) -> None:
    """Sets rows of ``ref``, 16-bit numbers in shared memory as ``tiled`` has them, to 0, from the
    ``first`` on: where in a row a number lies does not matter."""
    rows, columns = ref.shape
    tiles = columns * 2 // TILE_BYTES
    pattern = (plgpu.TilingTransform((GROUP, TILE_BYTES // 2)), plgpu.SwizzleTransform(TILE_BYTES))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(pattern), SCALAR))
    def apply(_: Any, ref: Any, first: Any) -> None:
        number = arith.andi(thread(), constant(127))
        each = 8 * tiles  # threads of a row, 16 bytes each
        mine = arith.divui(number, constant(each))
        place = arith.remui(number, constant(each))
        tile, chunk = arith.divui(place, constant(8)), arith.remui(place, constant(8))
        inside = arith.addi(
            arith.muli(tile, constant(GROUP * TILE_BYTES)), arith.muli(chunk, constant(16))
        )
        start = arith.addi(llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref)), inside)
        for turn in range(0, rows, 128 // each):
            row = arith.addi(mine, constant(turn))
            at = arith.muli(arith.divui(row, constant(GROUP)), constant(tiles * GROUP * TILE_BYTES))
            line = arith.muli(arith.remui(row, constant(GROUP)), constant(TILE_BYTES))
            at = arith.addi(arith.addi(start, at), line)
            text = (
                "{ .reg .pred p; setp.ge.s32 p, $1, $2; "
                "@p st.shared.v4.b32 [$0], {$3, $3, $3, $3}; }"
            )
            nothing = ir.Type.parse("!llvm.void")
            given = [at, row, first.registers.item(), constant(0)]
            llvm.inline_asm(nothing, given, text, "r,r,r,r", has_side_effects=True)

    apply(ref, first)


def store_rows(ref: Any, x: jax.Array, factors: jax.Array | None = None) -> None:
    """``x``, 64 rows in the layout of products, times ``factors`` of its rows, to ``ref``."""
    dtype = jnp.dtype(ref.dtype)
    name = {"float32": "", "float16": "f16x2", "bfloat16": "bf16x2"}[dtype.name]
    rows = () if factors is None else (factors,)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, *(ROW,) * len(rows)))
    def apply(_: Any, ref: Any, x: Any, *rows: Any) -> None:
        odd, upper = _bit(1), _bit(2)
        _, column = thread_place()  # two of a lane
        if name:
            start, row = _start(ref, 2, arith.muli(column, constant(4)))
        else:  # the odd lanes have the next eight columns
            mine = arith.andi(column, constant(4))
            start, row = _start(ref, 4, arith.select(odd, arith.addi(mine, constant(8)), mine))
        by = {}
        for at, pair in np.ndenumerate(x.registers):
            values = [element(pair, 0), element(pair, 1)]
            if rows:
                factor = element(rows[0].registers.flat[at[4]], 0)
                values = [arith.mulf(v, factor) for v in values]
            by[at[1], at[4]] = values

        def word(group: int, half: int) -> Any:
            low, high = by[group, half]
            text = f"cvt.rn.{name}.f32 $0, $1, $2;"
            return llvm.inline_asm(i32(), [high, low], text, "=r,f,f", has_side_effects=True)

        def write(offset: int, words: list[Any]) -> None:
            text = f"st.global.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};"
            nothing = ir.Type.parse("!llvm.void")
            llvm.inline_asm(nothing, [start, *words], text, "l,r,r,r,r", has_side_effects=True)

        each = 4 if name else 2
        for group in range(0, x.shape[1] // 8, each):
            for half in range(2):
                if name:
                    words = [word(group + i, half) for i in range(4)]
                    words = _transposed(odd, upper, words)
                else:
                    a, b = ([llvm.bitcast(i32(), v) for v in by[group + i, half]] for i in range(2))
                    first = [_exchanged(odd, 1, *both) for both in zip(a, b, strict=True)]
                    words = [low for low, _ in first] + [high for _, high in first]
                write(half * 8 * row + group * 8 * dtype.itemsize, words)

    apply(ref, x, *rows)
