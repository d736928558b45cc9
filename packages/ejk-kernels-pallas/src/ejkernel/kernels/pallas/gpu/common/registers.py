"""Tiles in the registers of one warpgroup: their layout, and operations the language lacks.

Functions of ``jax.Array`` are used in kernels; the others build the body of a
``plgpu.inline_mgpu`` from values of the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import memref as _memref
from jaxlib.mlir.dialects import scf as _scf
from jaxlib.mlir.dialects import vector as _vector

from ejkernel.kernels.pallas import compat

# the compiler's own operations, whose stubs are stricter than they are
arith: Any = _arith
llvm: Any = _llvm
memref: Any = _memref
scf: Any = _scf
vector: Any = _vector

LAYOUT = plgpu.Layout.WGMMA  # of results and left operands of matmuls: a tile of 64 rows
ROW, COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)
SCALAR = plgpu.Layout.WG_SPLAT(())


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def constant(n: float) -> Any:
    """An int as int32, a float as float32."""
    if isinstance(n, int):
        return arith.constant(i32(), ir.IntegerAttr.get(i32(), n))
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), n))


def compare(predicate: str, a: Any, b: Any) -> Any:
    """Compares two int32: a bit; ``predicate`` is eq, ne, slt, sle, sgt or sge."""
    return arith.cmpi(getattr(arith.CmpIPredicate, predicate), a, b)


def indices(*values: Any) -> list[Any]:
    return [arith.index_cast(ir.IndexType.get(), n) for n in values]


@contextmanager
def when(test: Any) -> Generator[None]:
    """Builds its body in a branch that runs where ``test`` holds."""
    branch = scf.IfOp(test)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def splat(x: Any) -> Any:
    """Returns an int32 as a scalar of the language."""
    return mgpu.FragmentedArray.splat(x, (), is_signed=True)


def asm(text: str, constraints: str, kind: Any, *operands: Any) -> Any:
    """Emits PTX that is not moved; ``kind`` is the type of the result, None without one."""
    kind = ir.Type.parse("!llvm.void") if kind is None else kind
    return llvm.inline_asm(kind, list(operands), text, constraints, has_side_effects=True)


def thread() -> Any:
    """Reads the thread index again: the compiler does not know that two reads are equal."""
    return asm("mov.u32 $0, %tid.x;", "=r", i32())


def other_lane(x: Any, distance: int) -> Any:
    """``x``, an int32 or float32, of the lane whose index differs in this bit."""
    kind = "r" if x.type == i32() else "f"
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
    return asm(text, f"={kind},{kind}", x.type, x)


def packed(low: Any, high: Any, dtype: Any) -> Any:
    """Two float32 rounded to float16 or bfloat16, as one int32."""
    name = {"float16": "f16x2", "bfloat16": "bf16x2"}[jnp.dtype(dtype).name]
    return asm(f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f", i32(), high, low)


def element(x: Any, at: int) -> Any:
    """Returns one element of a register that holds several."""
    position = ir.DenseI64ArrayAttr.get([at])
    return vector.extract(x, dynamic_position=[], static_position=position)


class TileRegister(NamedTuple):
    """A register of a tile in ``LAYOUT``: two neighbouring columns of a row.

    A thread has two rows, eight apart, and of every eight columns two (``thread_place``).

    Attributes:
        index: of the register in ``registers``.
        pair: its two values.
        half: 0 or 1: the thread's row.
        eight: the eight columns they belong to.
    """

    index: Any
    pair: Any
    half: int
    eight: int

    @property
    def row(self) -> int:
        """Rows from the thread's first row."""
        return 8 * self.half

    @property
    def column(self) -> int:
        """Columns from the thread's first column to the pair's first."""
        return 8 * self.eight


def tile_registers(x: Any) -> Iterator[TileRegister]:
    """Yields the registers of a tile in ``LAYOUT``, in their order."""
    for index, pair in np.ndenumerate(x.registers):
        yield TileRegister(index, pair, half=index[4], eight=index[1])


def like(x: Any, registers: Any) -> Any:
    """Returns other registers as an array in the layout of ``x``."""
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def on_registers(x: jax.Array, *layouts: Any) -> Callable:
    """Turns a function of registers into one of ``x`` and other arrays in these layouts.

    It returns float32 values in the shape and layout of ``x``.
    """
    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layouts[0])
    made = plgpu.inline_mgpu(arg_types=layouts, return_type=kind)
    return lambda function: made(lambda _, *arrays: function(*arrays))


def read(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """The values of a reference in a register layout."""
    return compat.load_registers(ref, layout=layout, optimized=optimized)


def spread(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A vector along one axis of a tile, the same along the other."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def thread_place() -> tuple[Any, Any]:
    """Returns row and column of a thread's first element of a tile in ``LAYOUT``.

    Reads the thread index again.
    """
    number = thread()
    warp = arith.andi(arith.shrui(number, constant(5)), constant(3))
    lane = arith.andi(number, constant(31))
    row = arith.addi(arith.shli(warp, constant(4)), arith.shrui(lane, constant(2)))
    return row, arith.shli(arith.andi(lane, constant(3)), constant(1))


def address(ref: Any, row: Any, column: Any) -> tuple[Any, int]:
    """(address of an element of ``ref`` in device memory, bytes from a row to the next)."""
    i64, kind = ir.IntegerType.get_signless(64), ir.MemRefType(ref.type)
    (stride, _), _ = kind.get_strides_and_offset()
    itemsize = mgpu.utils.bytewidth(kind.element_type)
    mine = arith.addi(arith.muli(row, constant(stride)), column)
    mine = arith.extui(i64, arith.muli(mine, constant(itemsize)))
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), mine), stride * itemsize
