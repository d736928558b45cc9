"""Conversion of 8-bit values in shared memory to 16-bit values in the layout of matmuls."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.registers import arith, asm, constant, i32, llvm, thread
from ejkernel.kernels.pallas.gpu.common.tma import COPY_ROWS

TILE_BYTES = 128  # bytes of a row in a tile of ``tiled``: the row of the pattern
TILE = COPY_ROWS * TILE_BYTES  # bytes of a tile
CHUNK = 16  # bytes that the pattern permutes: chunk c of row r is at c ^ r
PIECE = 16  # neighbouring values of a row that a thread converts at once: two chunks
PIECES_OF_TILE = TILE_BYTES // 2 // PIECE  # of a row of it
THREADS = 128  # of a warpgroup
TOGETHER = 4  # pieces of a thread that are read before the first is written

# four values, $2, to float16: two in $0 and two in $1
TO_FLOAT16 = {
    "int8": (  # 1024 + 128 + number, minus 1152
        ".reg .b32 x, y; mov.b32 y, 0xe480e480; xor.b32 x, $2, 0x80808080; "
        "prmt.b32 $0, x, 0x64646464, 0x4140; prmt.b32 $1, x, 0x64646464, 0x4342; "
        "add.rn.f16x2 $0, $0, y; add.rn.f16x2 $1, $1, y;"
    ),
    "float8_e4m3fn": (
        ".reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;"
    ),
    "float8_e5m2": "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
}
# the same to bfloat16
_FROM_FLOAT16 = " .reg .b16 c, d; .reg .f32 f, g;" + "".join(
    f" mov.b32 {{c, d}}, ${i}; cvt.f32.f16 f, c; cvt.f32.f16 g, d; cvt.rn.bf16x2.f32 ${i}, g, f;"
    for i in range(2)
)
TO_BFLOAT16 = {kind: text + _FROM_FLOAT16 for kind, text in TO_FLOAT16.items()} | {
    # seven bits, and a sign worth -128: 128 + bits, and -128 - 128 sign, whose sum is exact
    "int8": ".reg .b32 x, y, z; mov.b32 y, 0x43004300; mov.b32 z, 0xc300c300;"
    + "".join(
        f" prmt.b32 ${i}, $2, 0, {places}; lop3.b32 x, ${i}, 0x00800080, z, 0xea;"
        f" lop3.b32 ${i}, ${i}, 0x007f007f, y, 0xea; add.rn.bf16x2 ${i}, ${i}, x;"
        for i, places in enumerate(("0x4140", "0x4342"))
    )
}


def convert_rows(source: Any, target: Any, kind: str) -> None:
    """Converts ``source [rows, columns]`` of dtype ``kind`` to ``target``; both in shared memory.

    ``target`` is float16 or bfloat16 in the layout of ``tiled``, ``source`` is row-major. All
    threads of a warpgroup take part. ``source`` may be the second half of ``target``'s memory if
    ``target`` has 64 columns.
    """
    rows, columns = target.shape
    tiles = columns * 2 // TILE_BYTES  # of a row
    pieces = columns // PIECE  # of a row
    turns = rows * pieces // THREADS  # pieces of a thread
    may_overlap = tiles == 1
    to = {"float16": TO_FLOAT16, "bfloat16": TO_BFLOAT16}[jnp.dtype(target.dtype).name]
    text = f"{{ {to[kind]} }}"
    tile_shape = (COPY_ROWS, TILE_BYTES // 2)
    pattern = (plgpu.TilingTransform(tile_shape), plgpu.SwizzleTransform(TILE_BYTES))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(pattern)))
    def apply(_: Any, source: Any, target: Any) -> None:
        two = ir.Type.parse("!llvm.struct<(i32, i32)>")
        (pitch, _), _ = ir.MemRefType(source.type).get_strides_and_offset()
        (row_of_tiles, *_), _ = ir.MemRefType(target.type).get_strides_and_offset()
        source, target = (llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(x)) for x in (source, target))
        number = arith.andi(thread(), constant(THREADS - 1))
        # this thread's first piece: its place in the row, and the row
        piece = arith.remui(number, constant(pieces))
        line = arith.divui(number, constant(pieces))
        row = arith.remui(line, constant(COPY_ROWS))  # of the tile
        group = arith.divui(line, constant(COPY_ROWS))
        tile = arith.divui(piece, constant(PIECES_OF_TILE))
        # which half of a piece comes first: where lanes would meet in a bank otherwise, the second
        swapped = arith.xori(arith.shrui(number, constant(2)), arith.shrui(number, constant(3)))
        swapped = arith.andi(swapped, constant(int(tiles > 1)))
        chunk = arith.muli(arith.remui(piece, constant(PIECES_OF_TILE)), constant(2))
        tile_start = arith.muli(tile, constant(TILE))
        write_at = arith.addi(tile_start, arith.muli(row, constant(TILE_BYTES)))
        write_at = arith.addi(write_at, arith.muli(group, constant(2 * row_of_tiles)))
        write_at = arith.addi(target, write_at)
        line_start = arith.muli(line, constant(pitch))
        read_at = arith.addi(line_start, arith.muli(piece, constant(PIECE)))
        read_at = arith.addi(source, read_at)

        def half(index: int) -> tuple[Any, Any]:
            """Returns the addresses of half of the first piece: its source and target."""
            mine = arith.xori(swapped, constant(index))
            at = arith.xori(arith.addi(chunk, mine), row)
            read = arith.addi(read_at, arith.muli(mine, constant(PIECE // 2)))
            return read, arith.addi(write_at, arith.muli(at, constant(CHUNK)))

        halves = [half(index) for index in range(2)]
        row_step = THREADS // pieces  # rows from a piece of a thread to its next
        stride = row_step // COPY_ROWS * 2 * row_of_tiles

        def read(turn: int) -> list[Any]:
            load = f"ld.shared.v2.b32 {{$0, $1}}, [$2+{turn * row_step * pitch}];"
            words_read = [asm(load, "=r,=r,r", two, at) for at, _ in halves]
            return [[llvm.extractvalue(i32(), x, [i]) for i in range(2)] for x in words_read]

        def write(turn: int, words_read: list[Any]) -> None:
            store = f"st.shared.v4.b32 [$0+{turn * stride}], {{$1, $2, $3, $4}};"
            for (_, at), words in zip(halves, words_read, strict=True):
                pairs = [asm(text, "=&r,=&r,r", two, word) for word in words]
                wide = [llvm.extractvalue(i32(), x, [i]) for x in pairs for i in range(2)]
                asm(store, "r,r,r,r,r", None, at, *wide)

        for first in range(0, turns, TOGETHER):
            turns_together = range(first, min(first + TOGETHER, turns))
            words_read = [read(turn) for turn in turns_together]
            if may_overlap:  # a thread may write what others read
                mgpu.utils.warpgroup_barrier()
            for turn, x in zip(turns_together, words_read, strict=True):
                write(turn, x)

    apply(source, target)
