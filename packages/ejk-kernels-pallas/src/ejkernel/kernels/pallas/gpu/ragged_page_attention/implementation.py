"""Ragged attention over pages on Hopper: long sequences by the flash core, the others by Triton.

The kernels for every GPU (``ejkernel.kernels.triton``, found through the registry) plan the call,
decode, and attend to short sequences; those of many new tokens are given to ``LongRows``, and with
them those of one, whose decoding waits for memory while prefill does not. They complete its output.
Which sequence is whose is decided on the device, call by call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ejkernel.kernels.pallas.gpu.common.chip import current_chip
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import ROWS, ForwardTiles
from ejkernel.kernels.pallas.gpu.ragged_page_attention.forward import PagedForward
from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import ComposedKernel, Stage
from ejkernel.types import calls
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import arguments
from ejkernel.types.masks.structure import Band, Rules
from ejkernel.types.serving.problem import PagedProblem, RaggedProblem
from ejkernel.types.serving.schedule import LongPrefill

DTYPES = ("float16", "bfloat16")
DIMS = (64, 128)
MIN_ROWS = 128  # rows of a sequence that fill a tile of every head
COMPARED = 256  # tokens of the largest pages that a card has compared with the formula
ROUNDS = 2  # tiles a program at which walks of several lengths even out


def decodes(paged: PagedProblem) -> bool:
    """Whether the kernel can decode: two key heads at a time, whose query heads are copied by
    eights and fit a product. What is hidden is so before a cap or a sign could show it. Only of
    what a card has compared with the formula."""
    rows = 2 * paged.group
    plain = paged.soft_cap is None and paged.scale > 0
    compared = paged.query_dtype == "bfloat16" and paged.dim == 128
    return compared and plain and paged.kv_heads % 2 == 0 and rows % 8 == 0 and rows <= ROWS


def prefill_kernel(problem: RaggedProblem, cores: int) -> PagedForward:
    """Returns the kernel of the sequences that ``long_prefill`` attends to."""
    p, t = problem.paged, forward_tiles(problem.paged)
    capacity = -(-p.capacity // t.block_kv) * t.block_kv  # whole blocks
    attention = Problem(
        1, problem.rows, capacity, p.heads, p.kv_heads, p.dim, p.dim, p.query_dtype, p.scale,
        p.soft_cap, rules=Rules(band=Band(hi=0)),
    )  # fmt: skip
    return PagedForward(attention, t, (), cores, page=p.page_size, decodes=decodes(p))


def forward_tiles(paged: PagedProblem) -> ForwardTiles:
    """Returns the tiles of the kernel.

    Looking up pages takes registers, which leaves room for 64 columns of q; the constants of a cap
    take that room.
    """
    return ForwardTiles(q_held=0 if paged.soft_cap else 64, registers=232)


def long_prefill(work: Work, arrays: Arrays) -> Arrays:
    """Returns ``o [T, h, d]`` with the rows of long prefill, and of the sequences of one new token
    that ``decode_rows`` gives to this kernel. Other rows are unset.
    """
    p = work.problem.paged
    cache = arrays["k"].reshape(p.pages, p.page_size, -1, p.dim)
    tables = (arrays[name] for name in ("tables", "work_tiles", "decode_rows"))
    kernel = prefill_kernel(work.problem, work.target.cores)
    return {"o": kernel.attend(arrays["q"], cache, *tables)}


class Ragged(ComposedKernel, PallasKernel):
    """What both ragged operations have in common."""

    base_platform = "triton"
    chip = staticmethod(current_chip)
    stages: ClassVar[Mapping[str, Stage]] = {"long_prefill": long_prefill}

    def unsupported_reason(self, problem: RaggedProblem, target: Any) -> str | None:
        p, reason = problem.paged, super().unsupported_reason(problem, target)
        if reason is not None:
            return reason
        if p.query_dtype not in DTYPES or p.key_dtype != p.query_dtype:
            dtypes = f"{p.query_dtype} on {p.key_dtype}"
            return f"queries: {dtypes}, only {' and '.join(DTYPES)} are supported"
        if p.dim not in DIMS or p.layout.key_stride != 2 * p.dim:
            return f"queries: head dim {p.dim} is not among {DIMS}, or pages are padded to more"
        if p.page_size < 16 or p.page_size & (p.page_size - 1):
            cache = self.call.boundary.pools[0]
            return f"{cache}: pages of {p.page_size} are no power of two from 16 on"
        enough = self.long(problem, target).min_total_rows
        if problem.rows % 8 or problem.rows < enough:
            return f"queries: {problem.rows} rows are no multiple of 8, or fewer than {enough}"
        return None

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU; behind XLA with pages that no card has compared."""
        return 110 if self.problem_of(call).paged.page_size <= COMPARED else -1

    def long(self, problem: RaggedProblem, target: Any) -> LongPrefill:
        """Returns which sequences go to the stage here."""
        p, t = problem.paged, forward_tiles(problem.paged)
        enough = -(-ROUNDS * target.cores * MIN_ROWS // p.heads)
        return LongPrefill(MIN_ROWS, enough, t.block_q, t.block_kv, decodes(p))

    def choose(self, problem: RaggedProblem, target: Any) -> Any:
        return replace(super().choose(problem, target), long=self.long(problem, target))

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
