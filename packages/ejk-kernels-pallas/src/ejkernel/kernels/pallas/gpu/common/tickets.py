"""Work for whoever is free: numbers that programs take from one counter in device memory.

The counter is what ``pl.get_global(plgpu.SemaphoreType.REGULAR)`` gives: 0 when the launch begins.
One thread takes a number, and tells the others it is to be known to. A warpgroup asks ahead: an
answer takes about a microsecond.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.registers import (
    SCALAR,
    arith,
    asm,
    compare,
    constant,
    i32,
    indices,
    memref,
    splat,
    thread,
    when,
)

ASKS = 96  # the thread that asks for a warpgroup: its warp is not the one that starts copies

_TAKE = "atom.global.add.u32 {}, [$1], 1;"
_TAKE_FOR_WARP = (
    "{ .reg .pred p; .reg .b32 n, v; mov.u32 n, %laneid; setp.eq.u32 p, n, 0; mov.b32 v, 0; @p "
    + _TAKE.format("v")
    + " shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff; }"
)


def _take(counter: Any, instructions: str, clobbers: str = "") -> Any:
    address = mgpu.utils.memref_ptr(counter)
    return asm(instructions, "=r,l" + clobbers, i32(), address)


def taken_by_warp(counter: Any) -> jax.Array:
    """How many numbers were taken from ``counter`` before, int32; for a single warp."""
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)
    def take(_: Any, counter: Any) -> Any:
        return splat(_take(counter, _TAKE_FOR_WARP, ",~{memory}"))

    return take(counter)


def ask_ahead(counter: Any, words: Any, place: Any) -> None:
    """One thread asks for the number that ``taken_by_warpgroup`` of this place returns.

    For a warpgroup: what its threads wrote to shared memory before, all of them see. Nobody waits
    for the answer, which goes to ``words[place, -1]``, int32 in shared memory.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
    def ask(_: Any, counter: Any, words: Any, place: Any) -> None:
        mgpu.utils.warpgroup_barrier()
        _ask(counter, words, place)

    ask(counter, words, jnp.int32(place))


def taken_by_warpgroup(counter: Any, words: Any, place: Any, asks: Any) -> jax.Array:
    """As ``taken_by_warp``, for a warpgroup; where it does not ask, what ``ask_ahead`` asked for.

    Its threads tell each other by ``words[place, -1]``, int32 in shared memory.
    """
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    kinds = (plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=kind)
    def take(_: Any, counter: Any, words: Any, place: Any, asks: Any) -> Any:
        with when(compare("ne", asks.registers.item(), constant(0))):
            _ask(counter, words, place)
        mgpu.utils.warpgroup_barrier()
        return splat(memref.load(words, _at(words, place)))

    return take(counter, words, jnp.int32(place), jnp.int32(asks))


def word(words: Any, *place: Any) -> jax.Array:
    """``words[place]``, int32, also in a single warp, where no plain read is allowed."""
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(SCALAR,) * len(place)), return_type=kind)
    def read(_: Any, words: Any, *place: Any) -> Any:
        return splat(memref.load(words, indices(*(n.registers.item() for n in place))))

    return read(words, *(jnp.int32(n) for n in place))


def _at(words: Any, place: Any) -> list[Any]:
    index = ir.IndexType.get()
    last = ir.IntegerAttr.get(index, ir.MemRefType(words.type).shape[1] - 1)
    return [arith.index_cast(index, place.registers.item()), arith.constant(index, last)]


def _ask(counter: Any, words: Any, place: Any) -> None:
    number = arith.andi(thread(), constant(127))
    with when(compare("eq", number, constant(ASKS))):
        memref.store(_take(counter, _TAKE.format("$0")), words, _at(words, place))
