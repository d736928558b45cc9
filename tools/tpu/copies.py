"""Bytes that TPU kernels copy by hand, counted while the TPU interpreter runs them.

What the compiler writes of a kernel has its copies once, not how often they run or how many rows of
a page they take, which follow from lengths in scalar memory. So a call of the same heads, dims,
pages and tiles as the one that is compiled, over fewer tokens, is interpreted, and the bytes of
every copy are added up. Blocks that the pipeline copies are counted by ``traffic``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from tools.tpu.traffic import Traffic, count_traffic

from ejkernel.kernels import pallas
from ejkernel.kernels.pallas.tpu.common.chip import interpreter
from ejkernel.ops import interpret_mode
from ejktest.abstract import AbstractCall
from ejktest.drawn import wild_tables

DECODED = (1500, 1001, 2048, 700)  # contexts of sequences with one new token each
# new tokens of sequences, and contexts with them
PREFILLED = ((512, 1), (1024, 900))
ONE_ROW_EACH = ((1,) * len(DECODED), DECODED)
CACHES = ("key_cache", "value_cache", "latent_cache", "key", "value")
LATENT_VALUES = 512  # columns of a latent cache that are values


@dataclass(frozen=True)
class Counted:
    """A call with values.

    Attributes:
        least: the bytes it has to move: what it reads once and writes once. flops: of pairs of
            queries and keys that see each other. kernel: the kernel's name.
    """

    call: AbstractCall
    arrays: dict[str, Any]
    least: int
    flops: int
    kernel: str

    def traffic(self, kind: str) -> Traffic:
        """Returns the bytes that the kernel moves on a chip of this ``device_kind``."""
        run = self.call.forward(pallas)
        copied = count_copies(lambda: run({}, self.arrays), kind)
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.arrays)
        integers = {
            name: x if jnp.issubdtype(x.dtype, jnp.integer) and x.ndim < 3 else None
            for name, x in self.arrays.items()
        }
        with interpret_mode(), interpreter(True, kind):
            blocks = count_traffic(run, ({}, structs), ({}, integers), self.kernel)
        if blocks is None:
            raise LookupError(f"no kernel {self.kernel} in {self.call.operation}")
        return Traffic(copied + blocks.moved, self.least, self.flops)


def count_copies(run: Callable[[], Any], kind: str) -> int:
    """Returns the bytes that the copies of ``run``'s kernels read or write in device memory."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with interpret_mode(), interpreter(pltpu.InterpretParams(), kind), _noting() as copies:
            jax.block_until_ready(jax.jit(run)())
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    return sum(size * ends for size, ends in copies)


@contextlib.contextmanager
def _noting() -> Generator[list[tuple[int, int]]]:
    """Yields a list that gets, for each copy, its bytes and how many of its ends are in device
    memory."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator

    copies: list[tuple[int, int]] = []
    execute_read = simulator.DMA.execute_read

    def note(self: Any) -> None:
        starts = self.state == simulator.DmaState.STARTED
        execute_read(self)
        if starts:
            spaces = (self.src_memory_space, self.dst_memory_space)
            ends = sum(simulator.TPU_MEMORY_SPACE_NAMES[n] in ("any", "hbm") for n in spaces)
            copies.append((self.data.nbytes, ends))

    simulator.DMA.execute_read = note
    try:
        yield copies
    finally:
        simulator.DMA.execute_read = execute_read


def _zeros(call: AbstractCall, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Returns zeros in the dtypes of a call's arrays, of these shapes where they are given."""
    return {n: jnp.zeros(shapes.get(n, shape), dtype) for n, (shape, dtype) in call.arrays.items()}


def _row_bytes(x: Any) -> int:
    """Returns the bytes of a token of a cache ``[pages, tokens, ...]``."""
    return x.nbytes // (x.shape[0] * x.shape[1])


def decoding(call: AbstractCall, lens: tuple[int, ...] = DECODED) -> Counted:
    """Returns a decoding call over pages, or over contiguous caches, of these contexts."""
    rng, contexts = np.random.default_rng(0), np.array(lens, np.int32)
    batch, (_, heads, dim) = len(lens), call.arrays["query"][0]
    caches = [name for name in CACHES if name in call.arrays]
    shapes: dict[str, Any] = {"query": (batch, heads, dim)}
    if "block_tables" in call.arrays:
        page = call.arrays[caches[0]][0][1]
        tables, pages = wild_tables(rng, lens, page)
        shapes |= {name: (pages, *call.arrays[name][0][1:]) for name in caches}
        arrays = _zeros(call, **shapes, block_tables=tables.shape, context_lens=(batch,))
        arrays |= {"block_tables": jnp.asarray(tables), "context_lens": jnp.asarray(contexts)}
    else:
        shapes |= {name: (batch, max(lens), *call.arrays[name][0][2:]) for name in caches}
        arrays = _zeros(call, **shapes, sequence_start=(batch,), sequence_end=(batch,))
        arrays |= {"sequence_end": jnp.asarray(contexts)}
    tokens = sum(_row_bytes(arrays[name]) for name in caches) * sum(lens)
    width = LATENT_VALUES if "latent_cache" in caches else dim
    rows = arrays["query"].nbytes + arrays["query"].nbytes * width // dim
    flops = 2 * sum(lens) * heads * (dim + width)
    return Counted(call, arrays, tokens + rows, flops, "ejkernel_decode")


def mixed(call: AbstractCall, mix: tuple[tuple[int, ...], tuple[int, ...]]) -> Counted:
    """Returns a call of ragged attention over sequences of these new rows and contexts."""
    rows, lens = mix
    writes, count = call.operation.endswith("v3"), len(rows)
    pool, contexts = ("kv_cache", "kv_lens") if writes else ("kv_pages", "context_lens")
    tables, pages = wild_tables(np.random.default_rng(0), lens, call.arrays[pool][0][1])
    total = sum(rows)
    shapes: dict[str, Any] = {
        name: (total, *call.arrays[name][0][1:])
        for name in ("queries", "keys", "values")
        if name in call.arrays
    }
    shapes |= {pool: (pages, *call.arrays[pool][0][1:]), contexts: (count,)}
    shapes |= {"block_tables": tables.shape, "query_start_loc": (count + 1,)}
    arrays = _zeros(call, **shapes)
    arrays |= {"block_tables": jnp.asarray(tables), contexts: jnp.asarray(lens, jnp.int32)}
    arrays["query_start_loc"] = jnp.asarray(np.cumsum([0, *rows]), jnp.int32)
    if writes:
        arrays["distribution"] = jnp.full((3,), count, jnp.int32)
    else:
        arrays["num_seqs"] = jnp.int32(count)
    row = _row_bytes(arrays[pool])
    # new tokens are read from the call's arrays and written to their pages
    tokens = row * (sum(lens) + (total if writes else 0))
    pairs = sum(n * end - n * (n - 1) // 2 for n, end in zip(rows, lens, strict=True))
    flops = 4 * pairs * arrays["queries"].shape[1] * arrays["queries"].shape[2]
    return Counted(
        call, arrays, tokens + 2 * arrays["queries"].nbytes, flops, "ejkernel_ragged_attention"
    )
