"""Dynamic tile scheduling: programs fetch work indices from one counter in device memory.

The counter is ``pl.get_global(plgpu.SemaphoreType.REGULAR)``: 0 when the launch begins.
One thread fetches an index and passes it to the others. A warpgroup prefetches its next index: the
round trip takes about a microsecond.
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

FETCHING_THREAD = 96  # fetches for a warpgroup: its warp is not the one that starts copies

_ATOMIC_ADD = "atom.global.add.u32 {}, [$1], 1;"
_ATOMIC_ADD_OF_WARP = (
    "{ .reg .pred p; .reg .b32 n, v; mov.u32 n, %laneid; setp.eq.u32 p, n, 0; mov.b32 v, 0; @p "
    + _ATOMIC_ADD.format("v")
    + " shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff; }"
)


def _fetch_add(counter: Any, instructions: str, clobbers: str = "") -> Any:
    address = mgpu.utils.memref_ptr(counter)
    return asm(instructions, "=r,l" + clobbers, i32(), address)


def fetch_index_in_warp(counter: Any) -> jax.Array:
    """Fetches the next index from ``counter``, int32; for a single warp."""
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)
    def fetch(_: Any, counter: Any) -> Any:
        return splat(_fetch_add(counter, _ATOMIC_ADD_OF_WARP, ",~{memory}"))

    return fetch(counter)


def prefetch_index(counter: Any, words: Any, slot: Any) -> None:
    """Prefetches the index that ``fetch_index_in_warpgroup`` of this slot returns.

    For a warpgroup: all its threads see earlier writes of the warpgroup to shared memory. No thread
    waits for the index, which goes to ``words[slot, -1]``, int32 in shared memory.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
    def prefetch(_: Any, counter: Any, words: Any, slot: Any) -> None:
        mgpu.utils.warpgroup_barrier()
        _fetch_to_words(counter, words, slot)

    prefetch(counter, words, jnp.int32(slot))


def fetch_index_in_warpgroup(counter: Any, words: Any, slot: Any, fetches: Any) -> jax.Array:
    """Fetches the next index for a warpgroup, or returns the one that was prefetched.

    ``fetches``: whether ``prefetch_index`` was not called for this slot. The threads share the
    index through ``words[slot, -1]``, int32 in shared memory.
    """
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    kinds = (plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=kind)
    def fetch(_: Any, counter: Any, words: Any, slot: Any, fetches: Any) -> Any:
        with when(compare("ne", fetches.registers.item(), constant(0))):
            _fetch_to_words(counter, words, slot)
        mgpu.utils.warpgroup_barrier()
        return splat(memref.load(words, _at(words, slot)))

    return fetch(counter, words, jnp.int32(slot), jnp.int32(fetches))


def load_word(words: Any, *index: Any) -> jax.Array:
    """Reads ``words[index]``, int32, also in a single warp, where no plain read is allowed."""
    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(SCALAR,) * len(index)), return_type=kind)
    def read(_: Any, words: Any, *index: Any) -> Any:
        return splat(memref.load(words, indices(*(n.registers.item() for n in index))))

    return read(words, *(jnp.int32(n) for n in index))


def _at(words: Any, slot: Any) -> list[Any]:
    index = ir.IndexType.get()
    last = ir.IntegerAttr.get(index, ir.MemRefType(words.type).shape[1] - 1)
    return [arith.index_cast(index, slot.registers.item()), arith.constant(index, last)]


def _fetch_to_words(counter: Any, words: Any, slot: Any) -> None:
    number = arith.andi(thread(), constant(127))
    with when(compare("eq", number, constant(FETCHING_THREAD))):
        memref.store(_fetch_add(counter, _ATOMIC_ADD.format("$0")), words, _at(words, slot))
