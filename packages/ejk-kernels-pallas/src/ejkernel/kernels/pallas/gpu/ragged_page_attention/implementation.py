"""Ragged attention over pages on Hopper: long sequences by the flash core, the others by Triton.

The kernels for every GPU (``ejkernel.kernels.triton``, found through the registry) plan the call,
decode, and attend to short sequences; those of many new tokens are given to ``LongRows``, and with
them those of one, whose decoding waits for memory while prefill does not. They complete its output.
Which sequence is whose is decided on the device, call by call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from ejkernel.kernels.pallas.gpu.common.beside_triton import BesideTriton
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import ROWS, ForwardTiles
from ejkernel.kernels.pallas.gpu.ragged_page_attention.forward import PagedForward
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.types import calls
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import arguments
from ejkernel.types.masks.structure import Band, Rules
from ejkernel.types.serving.problem import PagedProblem

DTYPES = ("float16", "bfloat16")
DIMS = (64, 128)
LEAST = 128  # rows of a sequence that fill a tile of every head
COMPARED = 256  # tokens of the largest pages that a card has compared with the formula
ROUNDS = 2  # tiles a program at which walks of several lengths even out


@dataclass(frozen=True)
class LongRows:
    """Attention of sequences with at least ``least`` new tokens.

    Attributes:
        least: tokens from which on a sequence is given to it.
        enough: tokens of such sequences from which on it pays; with fewer it gets none.
        scale, soft_cap: of logits.
        tiles: of the kernel.
        cores: multiprocessors.
        single: whether it takes sequences of one new token too.
    """

    least: int
    enough: int
    scale: float
    soft_cap: float | None
    tiles: ForwardTiles
    cores: int
    single: bool = False

    @property
    def block_q(self) -> int:
        return self.tiles.block_q

    @property
    def block_kv(self) -> int:
        return self.tiles.block_kv

    def __call__(
        self, q: jax.Array, cache: jax.Array, tables: jax.Array, lines: jax.Array, own: jax.Array
    ) -> jax.Array:
        """o ``[T, h, d]`` in the rows of the tiles of ``lines``, and of the sequences of one row
        that ``own`` has. Other rows are whatever the memory held.

        cache ``[pages, page, 2 * kv heads, d]`` or packed without padding. lines int32
        ``[tiles + 1, 8]``, a tile each, in the order in which they are worked on: sequence, row,
        first and last row of the sequence, its length; tiles before its sequence and of it; query
        heads that are worked on together. Lines without a tile have 0 tiles, and so has the last.
        own int32 ``[n, 3]``: a sequence's first row; its length if it is decoded here, else 0; how
        many programs decode.
        """
        rows, heads, dim = q.shape
        cache = cache.reshape(*cache.shape[:2], -1, dim)
        page, t = cache.shape[1], self.tiles
        capacity = -(-page * tables.shape[1] // t.block_kv) * t.block_kv  # whole blocks
        problem = Problem(
            1, rows, capacity, heads, cache.shape[2] // 2, dim, dim, q.dtype.name, self.scale,
            self.soft_cap, rules=Rules(band=Band(hi=0)),
        )  # fmt: skip
        kernel = PagedForward(problem, t, (), self.cores, page=page, decodes=self.single)
        return kernel.attend(q, cache, tables, lines, own)


def decodes(paged: PagedProblem) -> bool:
    """Whether the kernel can decode: two key heads at a time, whose query heads are copied by
    eights and fit a product. What is hidden is so before a cap or a sign could show it. Only of
    what a card has compared with the formula."""
    rows = 2 * paged.group
    plain = paged.soft_cap is None and paged.scale > 0
    compared = paged.query_dtype == "bfloat16" and paged.dim == 128
    return compared and plain and paged.kv_heads % 2 == 0 and rows % 8 == 0 and rows <= ROWS


class Ragged(BesideTriton):
    """What both ragged operations have in common."""

    def unsupported_reason(self, problem: Any, target: Any) -> str | None:
        p, reason = problem.paged, self.rest.unsupported_reason(problem, target)
        if reason is not None:
            return reason
        if p.query_dtype not in DTYPES or p.key_dtype != p.query_dtype:
            dtypes = f"{p.query_dtype} on {p.key_dtype}"
            return f"queries: {dtypes}, only {' and '.join(DTYPES)} are supported"
        if p.dim not in DIMS or p.layout.key_stride != 2 * p.dim:
            return f"queries: head dim {p.dim} is not among {DIMS}, or pages are padded to more"
        if p.page_size < 16 or p.page_size & (p.page_size - 1):
            return f"{self.rest.cache}: pages of {p.page_size} are no power of two from 16 on"
        enough = self.long(problem, target).enough
        if problem.rows % 8 or problem.rows < enough:
            return f"queries: {problem.rows} rows are no multiple of 8, or fewer than {enough}"
        return None

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU; behind XLA with pages that no card has compared."""
        return 110 if self.problem_of(call).paged.page_size <= COMPARED else -1

    def long(self, problem: Any, target: Any) -> LongRows:
        p = problem.paged
        # looking up pages takes registers, which leaves room for 64 columns of q; a cap's
        # constants take that
        forward = ForwardTiles(q_held=0 if p.soft_cap else 64, registers=232)
        enough = -(-ROUNDS * target.cores * LEAST // p.heads)
        return LongRows(LEAST, enough, p.scale, p.soft_cap, forward, target.cores, decodes(p))

    def choose(self, problem: Any, target: Any) -> Any:
        long = self.long(problem, target)
        return replace(self.rest.choose(problem, target), long=long)

    def heuristic(self, call: BoundCall) -> dict[str, Any]:
        problem = self.problem_of(call)
        return self.choose(problem, self.target()).fields

    def candidates(self, call: BoundCall) -> list[dict[str, Any]]:
        return [self.heuristic(call)]


class RaggedPageAttention(Ragged):
    """Packed rows of any mix of prefill and decoding over pages, on a Hopper GPU.

    Sequences of at least 128 new tokens go through the core of flash attention, where a call has
    enough of them to fill the chip, and those of one new token are decoded beside them, unless one
    of these takes long by itself; all others as in the implementation for every GPU, which must be
    installed. Queries and caches are of one dtype, float16 or bfloat16, head dims 64 or 128,
    pages powers of two from 16 on, the packed rows a multiple of 8. No windows, sinks or scales.
    The tangent of a soft cap is the hardware's, exact to 2^-11. Two runs give the same bits.
    ``cfg`` is that of the implementation for every GPU.

    Source: Shah et al. 2024, FlashAttention-3 (arXiv 2407.08608); Kwon et al. 2023,
    "PagedAttention" (arXiv 2309.06180).
    """

    call = calls.RaggedPageAttention
    reads = arguments.RAGGED | {"softmax_scale", "logits_soft_cap"}


class RaggedPageAttentionv3(Ragged):
    """As ragged_page_attention, after writing the new keys and values to their pages, on a Hopper
    GPU.

    The cache is written in place, as by the implementation for every GPU.
    """

    call = calls.RaggedPageAttentionv3
    reads = arguments.RAGGED_UPDATE | {"softmax_scale", "logits_soft_cap"}


ragged_page_attention = RaggedPageAttention()
ragged_page_attention_v3 = RaggedPageAttentionv3()
