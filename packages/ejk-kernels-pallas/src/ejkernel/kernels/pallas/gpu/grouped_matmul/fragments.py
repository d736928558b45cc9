"""Tiles of 8-bit matrices as operands in registers, and their result as rows of 16 bits.

A matmul's left operand, and its result, have 64 rows: here columns of a matrix. Columns 2 i and
2 i + 1 of every 16 are rows i and i + 8, which the same threads hold: two neighbours of a row of
the result make a word.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.convert import TO_BFLOAT16, TO_FLOAT16
from ejkernel.kernels.pallas.gpu.common.registers import (
    LAYOUT,
    SCALAR,
    address,
    arith,
    asm,
    compare,
    constant,
    element,
    i32,
    llvm,
    packed,
    thread,
    tile_registers,
    when,
)
from ejkernel.kernels.pallas.gpu.common.tma import COPY_ROWS

ROWS = 64  # of an operand: columns of a matrix
DEPTH = 64  # of a step
LINE = 128  # bytes of a row of a tile of columns
CHUNK = 16  # bytes that stay together
PERMUTED = 16  # neighbouring columns whose order changes among themselves


def in_fragment_order(x: jax.Array) -> jax.Array:
    """Returns the last axis, columns of matrices, in the order of rows of ``load_fragment``."""
    pairs = x.reshape(*x.shape[:-1], -1, PERMUTED // 2, 2)
    return pairs.swapaxes(-1, -2).reshape(x.shape)


def pattern(row_bytes: int, itemsize: int) -> Any:
    """Returns the reference type of shared memory in rows of ``row_bytes``, as ``tma.tiled``."""
    tiling = plgpu.TilingTransform((COPY_ROWS, row_bytes // itemsize))
    return plgpu.RefType((tiling, plgpu.SwizzleTransform(row_bytes)))


def start_of(ref: Any) -> Any:
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))


def lane_position() -> tuple[Any, Any, Any]:
    """Returns the warp of the warpgroup, and a lane divided by 4 and modulo 4."""
    number = thread()
    warp = arith.andi(arith.shrui(number, constant(5)), constant(3))
    lane = arith.andi(number, constant(31))
    return warp, arith.shrui(lane, constant(2)), arith.andi(lane, constant(3))


def load_fragment(ref: Any, part: Any, kind: str, dtype: Any, *, transposed: bool) -> jax.Array:
    """Returns 64 columns of a tile of matrices as the left operand ``[64 columns, DEPTH]``.

    ref: int8 in shared memory, ``[DEPTH, columns]`` in rows of 128 bytes, or with ``transposed``
    ``[columns, DEPTH]``. part: which 64 columns. kind: the dtype of the values.
    """
    to = {"float16": TO_FLOAT16, "bfloat16": TO_BFLOAT16}[jnp.dtype(dtype).name]
    shape = (ROWS, DEPTH)

    @plgpu.inline_mgpu(
        arg_types=(pattern(DEPTH if transposed else LINE, 1), SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=LAYOUT),
    )
    def apply(_: Any, ref: Any, part: Any) -> Any:
        two = ir.Type.parse("!llvm.struct<(i32, i32)>")
        pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
        registers = np.empty(LAYOUT.to_mgpu().registers_shape(shape), dtype=object)
        load = _load_rows if transposed else _load_columns
        for eight, word in load(start_of(ref), part.registers.item()):
            pairs = asm(f"{{ {to[kind]} }}", "=&r,=&r,r", two, word)
            for half in range(2):
                at = [0] * registers.ndim
                at[1], at[4] = eight, half  # as in ``TileRegister``
                value = llvm.extractvalue(i32(), pairs, [half])
                registers[tuple(at)] = llvm.bitcast(pair, value)
        return mgpu.FragmentedArray(_registers=registers, _layout=LAYOUT.to_mgpu(), _is_signed=None)

    return apply(ref, jnp.int32(part))


def _load_columns(start: Any, part: Any) -> list[tuple[int, Any]]:
    """Returns (eight of the contracted axis, its four values of this thread) of ``[depth, n]``."""
    warp, _, _ = lane_position()
    lane = arith.andi(thread(), constant(31))  # its row of 32
    chunk = arith.addi(arith.muli(part, constant(4)), warp)
    chunk = arith.xori(chunk, arith.andi(lane, constant(COPY_ROWS - 1)))
    at = arith.addi(start, arith.muli(lane, constant(LINE)))
    at = arith.addi(at, arith.muli(chunk, constant(CHUNK)))
    four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    out = []
    for half in range(DEPTH // 32):
        # a transposed 8 x 8 of pairs: two columns of two steps of depth for every thread
        load = (
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, "
            f"[$4+{half * 32 * LINE}];"
        )
        words = asm(load, "=r,=r,=r,=r,r", four, at)
        for i in range(4):
            word = llvm.extractvalue(i32(), words, [i])
            # by columns: both values of the first, both of the second
            word = asm("prmt.b32 $0, $1, 0, 0x3120;", "=r,r", i32(), word)
            out.append((4 * half + i, word))
    return out


def _load_rows(start: Any, part: Any) -> list[tuple[int, Any]]:
    """Returns (eight of the contracted axis, its four values of this thread) of ``[n, depth]``."""
    warp, i, t = lane_position()
    # lanes 16 to 31 read their second row first: together all lanes read every bank once
    swapped = arith.shrui(i, constant(2))
    row = arith.addi(arith.muli(part, constant(ROWS)), arith.muli(warp, constant(16)))
    row = arith.addi(row, arith.addi(arith.muli(i, constant(2)), swapped))
    base = arith.addi(arith.muli(row, constant(DEPTH)), arith.muli(t, constant(2)))
    base = arith.addi(start, base)
    base = arith.addi(base, arith.muli(arith.andi(i, constant(3)), constant(CHUNK)))
    order = arith.select(compare("eq", swapped, constant(0)), constant(0x5410), constant(0x1054))
    out = []
    for chunk in range(DEPTH // CHUNK):
        first = arith.xori(base, constant(chunk * CHUNK))
        second = arith.xori(first, constant(DEPTH))
        for half in range(2):
            load = f"ld.shared.u16 $0, [$1+{8 * half}];"
            words = [asm(load, "=r,r", i32(), at) for at in (first, second)]
            word = asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", i32(), *words, order)
            out.append((2 * chunk + half, word))
    return out


def stage_result(ref: Any, x: jax.Array) -> None:
    """Writes a result ``[64 columns, rows]`` to ``ref [rows, 64]``, in 16 bits and the pattern.

    x: float32, its rows in the order of columns of ``load_fragment``.
    """
    dtype = jnp.dtype(ref.dtype)

    @plgpu.inline_mgpu(arg_types=(pattern(LINE, 2), LAYOUT))
    def apply(_: Any, ref: Any, x: Any) -> None:
        warp, i, t = lane_position()
        row = arith.muli(t, constant(2))
        chunk = arith.addi(arith.muli(warp, constant(2)), arith.shrui(i, constant(2)))
        inside = arith.muli(arith.andi(i, constant(3)), constant(4))
        start = arith.addi(start_of(ref), inside)
        starts = []
        for odd in range(2):
            mine = arith.addi(row, constant(odd))
            at = arith.addi(start, arith.muli(mine, constant(LINE)))
            at = arith.addi(at, arith.muli(arith.xori(chunk, mine), constant(CHUNK)))
            starts.append(at)
        halves: dict[tuple[int, int], Any] = {}
        for register in tile_registers(x):
            halves[register.eight, register.half] = register.pair
        for eight in range(x.shape[1] // 8):
            for odd in range(2):
                low, high = (element(halves[eight, half], odd) for half in range(2))
                word = packed(low, high, dtype)
                store = f"st.shared.b32 [$0+{eight * COPY_ROWS * LINE}], $1;"
                asm(store, "r,r", None, starts[odd], word)

    apply(ref, x)


def store_staged(ref: Any, staged: Any, first: Any, last: Any) -> None:
    """Copies rows ``first`` .. ``last`` of ``staged [rows, 64]`` to ``ref`` in device memory.

    Every thread copies chunks of 16 bytes: for partial tiles, not for full ones.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), pattern(LINE, 2), SCALAR, SCALAR))
    def apply(_: Any, ref: Any, staged: Any, *ends: Any) -> None:
        first, last = (n.registers.item() for n in ends)
        rows = ir.MemRefType(ref.type).shape[0]
        number = arith.andi(thread(), constant(127))
        line, chunk = arith.shrui(number, constant(3)), arith.andi(number, constant(7))
        target, pitch = address(ref, line, arith.muli(chunk, constant(8)))
        position = arith.xori(chunk, arith.andi(line, constant(COPY_ROWS - 1)))
        source = arith.addi(start_of(staged), arith.muli(line, constant(LINE)))
        source = arith.addi(source, arith.muli(position, constant(CHUNK)))
        for n in range(0, rows, 16):
            mine = arith.addi(line, constant(n))
            with when(arith.andi(compare("sge", mine, first), compare("slt", mine, last))):
                text = (
                    f"{{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {{a, b, c, d}}, [$0+{n * LINE}]; "
                    f"st.global.v4.b32 [$1+{n * pitch}], {{a, b, c, d}}; }}"
                )
                asm(text, "r,l", None, source, target)

    apply(ref, staged, jnp.int32(first), jnp.int32(last))
