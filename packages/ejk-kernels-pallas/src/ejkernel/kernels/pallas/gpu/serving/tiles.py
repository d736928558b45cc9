"""Calls that the Hopper serving kernels take, and their tiles: arithmetic with its reasons."""

from __future__ import annotations

from ejkernel.kernels.pallas.gpu.flash_attention.tiles import ROWS, ForwardTiles
from ejkernel.types.serving.problem import PagedProblem, RaggedProblem
from ejkernel.types.serving.schedule import LongPrefill

DTYPES = ("float16", "bfloat16")
DIMS = (64, 128)  # head dims of long prefill
MIN_ROWS = 128  # rows of a sequence that fill a tile of every head
MIN_ROUNDS = 2  # tiles a program at which tiles of several lengths even out
MAX_COMPARED_PAGE = 256  # tokens of the largest pages compared with the reference on a GPU


def forward_tiles(paged: PagedProblem) -> ForwardTiles:
    """Returns the tiles of long prefill.

    Registers: the producer looks up pages, which leaves consumers room for 64 columns of q, or for
    the constants of a soft cap. If it also converts pages of 8 bits, they have room for neither (an
    H200 takes 4.96 ms for four prompts of 8k; with 64 columns and 224 registers 5.65).

    Shared memory: at heads of 128 the staged bytes take the place of the second buffer of queries.
    """
    if paged.is_eight_bit:
        return ForwardTiles(q_held=0, q_stages=1 if paged.dim > 64 else 2, registers=216)
    return ForwardTiles(q_held=0 if paged.soft_cap else 64, registers=232)


def long_prefill_of(problem: RaggedProblem, cores: int) -> LongPrefill:
    """Returns which sequences are long prefill."""
    p, t = problem.paged, forward_tiles(problem.paged)
    min_total_rows = -(-MIN_ROUNDS * cores * MIN_ROWS // p.heads)
    return LongPrefill(MIN_ROWS, min_total_rows, t.block_q, t.block_kv, can_decode(p))


def can_decode(paged: PagedProblem) -> bool:
    """Returns whether the prefill kernel can decode.

    It takes two kv heads at a time, whose query heads are copied by eights and fit one matmul. It
    hides keys before ``softmax_step``, in which a cap or a negative scale would show them again.
    Only calls compared with the reference on a GPU count.
    """
    rows = 2 * paged.group
    is_plain = paged.soft_cap is None and paged.scale > 0
    is_compared = paged.query_dtype == paged.key_dtype == "bfloat16" and paged.dim == 128
    return is_compared and is_plain and paged.kv_heads % 2 == 0 and rows % 8 == 0 and rows <= ROWS
