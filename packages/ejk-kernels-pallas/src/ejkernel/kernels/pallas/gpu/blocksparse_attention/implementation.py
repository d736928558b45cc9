"""Block-sparse attention on Hopper as one kernel object: flash attention over lists of tiles."""

from __future__ import annotations

from ejkernel.kernels.pallas.gpu.common.chip import Chip
from ejkernel.kernels.pallas.gpu.flash_attention import lists, preference
from ejkernel.kernels.pallas.gpu.flash_attention.implementation import FlashAttention
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.types import calls
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import arguments


class BlockSparseAttention(FlashAttention):
    """Attention over the blocks that a pattern allows, on a Hopper GPU.

    Flash attention's kernels over lists of the tiles that the pattern and the mask leave, made on
    the device. Dtypes, head dims, masks and ``cfg`` as there; blocks of any
    multiples of 16 rows and keys, best of 128 or more: a tile that covers several blocks is
    computed if one of them is seen.

    Source: Shah et al. 2024, FlashAttention-3 (arXiv 2407.08608), section 3.
    """

    call = calls.BlockSparseAttention
    reads = arguments.FLASH | arguments.PATTERN

    def unsupported_reason(self, problem: Problem, target: Chip) -> str | None:
        return super().unsupported_reason(problem, target) or lists.unsupported_reason(problem)

    def priority_for(self, call: BoundCall) -> int:
        """Ahead of the kernels for every GPU where measured."""
        problem = self.problem_of(call)
        if problem.pattern_blocks is None:
            return super().priority_for(call)
        return preference.of_pattern(problem)


blocksparse_attention = BlockSparseAttention()
