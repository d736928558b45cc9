"""Work for whoever is free: numbers that programs take from one counter in device memory.

The counter is what ``pl.get_global(plgpu.SemaphoreType.REGULAR)`` gives: 0 when the launch begins.
One thread takes a number, and tells the others it is to be known to.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref as _memref

from ejkernel.kernels.pallas.gpu.common.masks import SCALAR, arith, constant, i32, llvm, scf, thread

memref: Any = _memref

_TAKE = "atom.global.add.u32 {}, [$1], 1;"
_TAKE_FOR_WARP = (
    "{ .reg .pred p; .reg .b32 n, v; mov.u32 n, %laneid; setp.eq.u32 p, n, 0; mov.b32 v, 0; @p "
    + _TAKE.format("v")
    + " shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff; }"
)


def _take(counter: Any, instructions: str, clobbers: str = "") -> Any:
    address = mgpu.utils.memref_ptr(counter)
    return llvm.inline_asm(i32(), [address], instructions, "=r,l" + clobbers, has_side_effects=True)


def taken_by_warp(counter: Any) -> jax.Array:
    """How many numbers were taken from ``counter`` before, int32; for a single warp."""
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)
    def take(_: Any, counter: Any) -> Any:
        number = _take(counter, _TAKE_FOR_WARP, ",~{memory}")
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return take(counter)


def taken_by_warpgroup(counter: Any, words: Any, place: Any, asks: Any) -> jax.Array:
    """As ``taken_by_warp``, for a warpgroup: 0 where it does not ask, and nothing is taken.

    Its threads tell each other by ``words[place, -1]``, int32 in shared memory.
    """
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    kinds = (plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=kind)
    def take(_: Any, counter: Any, words: Any, place: Any, asks: Any) -> Any:
        index = ir.IndexType.get()
        last = ir.MemRefType(words.type).shape[1] - 1
        at = [
            arith.index_cast(index, place.registers.item()),
            arith.constant(index, ir.IntegerAttr.get(index, last)),
        ]
        compare = arith.CmpIPredicate
        first = arith.cmpi(compare.eq, arith.andi(thread(), constant(127)), constant(0))
        chosen = scf.IfOp(first)
        with ir.InsertionPoint(chosen.then_block):
            wanted = arith.cmpi(compare.ne, asks.registers.item(), constant(0))
            asking = scf.IfOp(wanted, [i32()], has_else=True)
            with ir.InsertionPoint(asking.then_block):
                scf.yield_([_take(counter, _TAKE.format("$0"))])
            with ir.InsertionPoint(asking.else_block):
                scf.yield_([constant(0)])
            memref.store(asking.results[0], words, at)
            scf.yield_([])
        mgpu.utils.warpgroup_barrier()
        number = memref.load(words, at)
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return take(counter, words, jnp.int32(place), jnp.int32(asks))
