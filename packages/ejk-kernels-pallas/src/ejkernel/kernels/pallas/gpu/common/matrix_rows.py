"""Tiles in shared memory to and from the registers of matmuls, four matrices an instruction.

``ldmatrix`` and ``stmatrix`` move four matrices of 8 x 8 values of 16 bits. Here these are the four
registers in a row that ``wgmma`` reads of 16 columns of its left operand. Mosaic GPU reads matrices
in another order, so that an operand which stays in registers needs others than it was read to: of
112 registers a thread, ptxas spills 96, and reads them again before every matmul.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.convert import CHUNK, TILE, TILE_BYTES
from ejkernel.kernels.pallas.gpu.common.registers import (
    LAYOUT,
    ROW,
    arith,
    asm,
    constant,
    element,
    i32,
    llvm,
    packed,
    thread,
    tile_registers,
)
from ejkernel.kernels.pallas.gpu.common.tma import COPY_ROWS

MATRIX_COLUMNS = 16  # of four matrices; they have 16 rows
STEPS_OF_TILE = TILE_BYTES // 2 // MATRIX_COLUMNS
PATTERN = (
    plgpu.TilingTransform((COPY_ROWS, TILE_BYTES // 2)),
    plgpu.SwizzleTransform(TILE_BYTES),
)


class _MatrixAddresses:
    """Addresses of a lane: of the line that it gives to the instruction.

    Lanes 0 to 7 give the lines of the first matrix, lanes 8 to 15 the eight rows below it, and the
    other lanes the next eight columns of both.
    """

    def __init__(self, ref: Any) -> None:
        (row_of_tiles, *_), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        number = thread()
        line = arith.andi(number, constant(COPY_ROWS - 1))
        group = arith.andi(arith.shrui(number, constant(3)), constant(1))
        warp = arith.andi(arith.shrui(number, constant(5)), constant(3))
        group = arith.addi(group, arith.shli(warp, constant(1)))
        right = arith.andi(arith.shrui(number, constant(4)), constant(1))
        start = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))
        start = arith.addi(start, arith.muli(group, constant(2 * row_of_tiles)))
        start = arith.addi(start, arith.muli(line, constant(TILE_BYTES)))
        self.starts = []
        for step in range(STEPS_OF_TILE):
            chunk = arith.xori(arith.addi(right, constant(2 * step)), line)
            self.starts.append(arith.addi(start, arith.muli(chunk, constant(CHUNK))))

    def at(self, step: int) -> tuple[Any, int]:
        """Returns address and offset for the step-th 16 columns."""
        tile, step = divmod(step, STEPS_OF_TILE)
        return self.starts[step], tile * TILE


def read_matrices(ref: Any) -> jax.Array:
    """Returns ``ref [64, columns]``, of 16-bit values in the layout of ``tiled``, as an operand."""
    kind = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=LAYOUT)
    columns = ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(PATTERN),), return_type=kind)
    def apply(_: Any, ref: Any) -> Any:
        addresses = _MatrixAddresses(ref)
        four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        pair = ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
        registers = np.empty(LAYOUT.to_mgpu().registers_shape((64, columns)), dtype=object)
        for step in range(columns // MATRIX_COLUMNS):
            start, offset = addresses.at(step)
            text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
            words = asm(text, "=r,=r,=r,=r,r", four, start)
            for i in range(4):
                at = [0] * registers.ndim
                at[1], at[4] = 2 * step + i // 2, i % 2  # as in ``TileRegister``
                word = llvm.extractvalue(i32(), words, [i])
                registers[tuple(at)] = llvm.bitcast(pair, word)
        return mgpu.FragmentedArray(_registers=registers, _layout=LAYOUT.to_mgpu(), _is_signed=None)

    return apply(ref)


def write_matrices(ref: Any, x: jax.Array, factors: jax.Array) -> None:
    """Writes float32 ``x``, 64 rows in the layout of matmuls, times ``factors`` of rows to ``ref``.

    ``ref`` has 16-bit values in the layout of ``tiled``.
    """
    dtype = jnp.dtype(ref.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(PATTERN), LAYOUT, ROW))
    def apply(_: Any, ref: Any, x: Any, factors: Any) -> None:
        addresses = _MatrixAddresses(ref)
        rows = [element(r, 0) for r in factors.registers.flat]
        pairs = {(register.eight, register.half): register.pair for register in tile_registers(x)}
        for step in range(x.shape[1] // MATRIX_COLUMNS):
            start, offset = addresses.at(step)
            words = []
            for i in range(4):
                eight, half = 2 * step + i // 2, i % 2
                values = [arith.mulf(element(pairs[eight, half], n), rows[half]) for n in range(2)]
                words.append(packed(*values, dtype))
            text = f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1, $2, $3, $4}};"
            asm(text, "r,r,r,r,r", None, start, *words)

    apply(ref, x, factors)
