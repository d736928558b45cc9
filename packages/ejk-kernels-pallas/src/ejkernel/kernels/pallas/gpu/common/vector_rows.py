"""Rows of device memory to and from the registers of matmuls, 16 bytes a lane.

In those registers the four lanes of a quad have two neighbouring columns of every eight each. Lanes
that access just these would move four and eight bytes at a time, limited by how many rows they
touch. Here a lane reads or writes consecutive columns, and the quad exchanges them.
"""

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
    llvm,
    other_lane,
    packed,
    thread,
    thread_place,
    tile_registers,
)


def _bit(mask: int) -> Any:
    """Returns whether this lane's number has a bit."""
    return compare("ne", arith.andi(thread(), constant(mask)), constant(0))


def _exchanged(bit: Any, distance: int, a: Any, b: Any) -> tuple[Any, Any]:
    """(a, the other's a) in the lane without the bit, (the other's b, b) in the one with it."""
    got = other_lane(arith.select(bit, a, b), distance)
    return arith.select(bit, got, a), arith.select(bit, b, got)


def _transposed(odd: Any, upper: Any, words: list[Any]) -> list[Any]:
    """Word i of lane j is word j of lane i."""
    w = list(words)
    w[0], w[1] = _exchanged(odd, 1, w[0], w[1])
    w[2], w[3] = _exchanged(odd, 1, w[2], w[3])
    w[0], w[2] = _exchanged(upper, 2, w[0], w[2])
    w[1], w[3] = _exchanged(upper, 2, w[1], w[3])
    return w


def load_rows(ref: Any) -> jax.Array:
    """Returns the 64 rows of ``ref``, of 16-bit values, as an operand of matmuls."""
    kind = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=LAYOUT)
    groups = ref.shape[1] // 8

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)
    def apply(_: Any, ref: Any) -> Any:
        row, column = thread_place()
        start, pitch = address(ref, row, arith.muli(column, constant(4)))
        four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        loaded = {}
        for group in range(0, groups, 4):
            for half in range(2):
                text = f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{half * 8 * pitch + group * 16}];"
                loaded[group, half] = asm(text, "=r,=r,=r,=r,l", four, start)
        odd, upper = _bit(1), _bit(2)
        number = ir.MemRefType(ref.type).element_type
        pair = ir.VectorType.get((2,), number)
        registers = np.empty(LAYOUT.to_mgpu().registers_shape((64, groups * 8)), dtype=object)
        for (group, half), words in loaded.items():
            words = [llvm.extractvalue(i32(), words, [i]) for i in range(4)]
            for i, word in enumerate(_transposed(odd, upper, words)):
                at = [0] * registers.ndim
                at[1], at[4] = group + i, half  # as in ``TileRegister``
                registers[tuple(at)] = llvm.bitcast(pair, word)
        return mgpu.FragmentedArray(_registers=registers, _layout=LAYOUT.to_mgpu(), _is_signed=None)

    return apply(ref)


def store_rows(
    ref: Any, x: jax.Array, factors: jax.Array | None = None, *, other: Any = None, use: Any = True
) -> None:
    """Stores ``x``, 64 rows in the layout of matmuls, times ``factors`` of its rows, to ``ref``.

    Where ``use`` is false it goes to ``other``, which has the dtype and the row length of ``ref``.
    """
    dtype = jnp.dtype(ref.dtype)
    is_32_bit = dtype.itemsize == 4
    rows = () if factors is None else (factors,)
    choice = () if other is None else (other, use)
    types = (plgpu.RefType(), SCALAR) if choice else ()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, *types, *(ROW,) * len(rows)))
    def apply(_: Any, ref: Any, x: Any, *others: Any) -> None:
        choice, rows = others[: len(types)], others[len(types) :]
        odd, upper = _bit(1), _bit(2)
        row, column = thread_place()  # two columns of a lane
        if is_32_bit:  # the odd lanes have the next eight columns
            column = arith.andi(column, constant(4))
            column = arith.select(odd, arith.addi(column, constant(8)), column)
        else:
            column = arith.muli(column, constant(4))
        start, pitch = address(ref, row, column)
        if choice:
            elsewhere, _ = address(choice[0], row, column)
            start = arith.select(choice[1].registers.item(), start, elsewhere)
        scaled = {}
        for _, pair, half, eight in tile_registers(x):
            values = [element(pair, 0), element(pair, 1)]
            if rows:
                factor = element(rows[0].registers.flat[half], 0)
                values = [arith.mulf(v, factor) for v in values]
            scaled[eight, half] = values

        groups_together = 2 if is_32_bit else 4
        for group in range(0, x.shape[1] // 8, groups_together):
            for half in range(2):
                mine = [scaled[group + i, half] for i in range(groups_together)]
                if is_32_bit:
                    a, b = ([llvm.bitcast(i32(), v) for v in values] for values in mine)
                    pairs = [_exchanged(odd, 1, *both) for both in zip(a, b, strict=True)]
                    words = [low for low, _ in pairs] + [high for _, high in pairs]
                else:
                    words = _transposed(odd, upper, [packed(*values, dtype) for values in mine])
                text = f"st.global.v4.b32 [$0+{half * 8 * pitch + group * 8 * dtype.itemsize}], "
                asm(text + "{$1, $2, $3, $4};", "l,r,r,r,r", None, start, *words)

    apply(ref, x, *choice, *rows)
