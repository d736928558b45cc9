"""Ragged attention over pages on TPU as kernel objects, with and without writing new keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.ragged_page_attention import tiles
from ejkernel.kernels.pallas.tpu.ragged_page_attention.kernel import attend
from ejkernel.kernels.pallas.tpu.ragged_page_attention.tiles import Layout, Tiles
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import Stage, StagedKernel
from ejkernel.ops.xla_gradients import XlaGradients
from ejkernel.types import calls
from ejkernel.types.arrays import quantise
from ejkernel.types.calls import arguments
from ejkernel.types.serving.problem import RaggedProblem
from ejkernel.types.serving.write import write_slots


def attend_pages(work: Work, arrays: Arrays) -> Arrays:
    """Returns the outputs over a cache that holds all keys."""
    return _attend(Layout(work.problem, work.tiles, work.target), arrays)


def write_and_attend(work: Work, arrays: Arrays) -> Arrays:
    """Returns the outputs, and the cache with the new keys and values."""
    return _attend(Layout(work.problem, work.tiles, work.target, writes=True), arrays)


def _attend(layout: Layout, arrays: Arrays) -> Arrays:
    p, cache = layout.paged, arrays["k"]
    pool = cache.reshape(p.pages, p.page_size, layout.token_rows, layout.width)
    q = arrays["q"].reshape(-1, p.kv_heads, p.group, p.dim)
    padding = (layout.group - p.group, layout.width - p.dim)
    if any(padding):
        q = jnp.pad(q, ((0, 0), (0, 0), *((0, n) for n in padding)))
    q = q.reshape(-1, layout.heads, layout.width)
    new = _new_rows(layout, arrays, pool) if layout.writes else None
    o, lse, written_pool = attend(layout, arrays | {"q": q}, pool, new)
    o = o.reshape(-1, p.kv_heads, layout.group, layout.width)[:, :, : p.group, : p.dim]
    outputs = {"o": o.reshape(-1, p.heads, p.dim)}
    if lse is not None:
        lse = lse[:, 0, : layout.heads].reshape(-1, p.kv_heads, layout.group)
        outputs["lse"] = lse[:, :, : p.group].reshape(-1, p.heads)
    if written_pool is not None:
        outputs["k"] = written_pool.reshape(cache.shape)
    return outputs


def _new_rows(layout: Layout, arrays: Arrays, pool: jax.Array) -> jax.Array:
    """Returns new keys and values as rows of the cache, ``[T, rows of a token, width]``."""
    p = layout.paged
    keys, values = (
        x if x.dtype == pool.dtype else quantise(x, arrays.get(scale), pool.dtype)
        for x, scale in ((arrays["keys"], "k_scale"), (arrays["values"], "v_scale"))
    )
    rows = jnp.stack([keys, values], axis=2).reshape(-1, 2 * p.kv_heads, p.dim)
    if rows.shape[1:] == pool.shape[2:]:
        return rows
    # whole rows are copied to the pages: their padding is what the pages have there
    slots = arrays["lens"], arrays["tables"], arrays["starts"], arrays["valid"][-1]
    page, offset = write_slots(*slots, layout.problem.rows, p.page_size)
    old = pool[jnp.clip(page, 0, p.pages - 1), offset]
    return old.at[:, : rows.shape[1], : p.dim].set(rows)


class Ragged(XlaGradients, PallasKernel, StagedKernel):
    """Common to both operations. ``cache``: the name of their cache argument."""

    cache: str
    writes: bool = False
    chip = staticmethod(current_chip)
    choose = staticmethod(tiles.choose)

    def unsupported_reason(self, problem: RaggedProblem, target: Chip) -> str | None:
        return tiles.unsupported_reason(problem, self.cache, target, writes=self.writes)

    def variant_reason(self, problem: RaggedProblem) -> str | None:
        return None  # blocks of queries and of keys begin at a sequence's own tokens

    def sequence_problem(self, problem: RaggedProblem) -> RaggedProblem:
        return problem.of_sequence()

    def neighbours(self, problem: RaggedProblem, target: Chip, chosen: Tiles) -> Iterable[Tiles]:
        return tiles.neighbours(problem, target, chosen)


class RaggedPageAttention(Ragged):
    """Packed rows of any mix of prefill and decoding over pages, on a TPU.

    Queries are bfloat16 or float32; caches are of these dtypes, int8, float8_e4m3fn or float8_e5m2;
    rows of the cache have 128 columns, those for a token are 1, 2, 4 or a multiple of 8 words of 32
    bits. What no row sees has no influence. Two calls give the same bits. XLA computes the
    gradients, and ``vmap`` is a loop. ``cfg``: num_queries_per_block, num_kv_pages_per_block.
    """

    call = calls.RaggedPageAttention
    reads = (
        arguments.RAGGED
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | arguments.TREE
        | {"return_lse"}
    )
    cache = "kv_pages"
    stages: ClassVar[Mapping[str, Stage]] = {"attend": attend_pages}


class RaggedPageAttentionv3(Ragged):
    """Ragged attention that writes the new keys and values to their pages, on a TPU.

    The cache is written in place, by copies that run during the attention: donated under
    ``jax.jit`` it is not copied. It is plain, or packed, where head dims below 128 are padded. A
    row whose table entry names no page is not written. For the rest as ragged_page_attention.
    """

    call = calls.RaggedPageAttentionv3
    reads = (
        arguments.RAGGED_UPDATE
        | arguments.DECODE_OPTIONS
        | arguments.CACHE_SCALES
        | arguments.TREE
        | {"q_scale", "return_lse"}
    )
    cache = "kv_cache"
    writes = True
    stages: ClassVar[Mapping[str, Stage]] = {"attend": write_and_attend}


ragged_page_attention = RaggedPageAttention()
ragged_page_attention_v3 = RaggedPageAttentionv3()
