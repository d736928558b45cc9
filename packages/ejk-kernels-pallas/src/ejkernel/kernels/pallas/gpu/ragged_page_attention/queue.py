"""A queue that all programs take from: one counter in device memory."""

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


def taken_before(counter: Any, words: Any, place: Any, asks: Any) -> jax.Array:
    """How many numbers were taken from ``counter`` before; 0 where a warpgroup does not ask.

    One thread takes it, and tells the others of its warpgroup by ``words[place, -1]``.
    """
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    kinds = (plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=kind)
    def ask(_: Any, counter: Any, words: Any, place: Any, asks: Any) -> Any:
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
                address = mgpu.utils.memref_ptr(counter)
                number = llvm.inline_asm(
                    i32(), [address], "atom.global.add.u32 $0, [$1], 1;", "=r,l",
                    has_side_effects=True,
                )  # fmt: skip
                scf.yield_([number])
            with ir.InsertionPoint(asking.else_block):
                scf.yield_([constant(0)])
            memref.store(asking.results[0], words, at)
            scf.yield_([])
        mgpu.utils.warpgroup_barrier()
        number = memref.load(words, at)
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return ask(counter, words, jnp.int32(place), jnp.int32(asks))
