"""Flash attention on Hopper as one kernel object: supported calls, tiles, kernels.

Residuals are q, k, v, o, the lse of every row and the arguments of the caller; the [q, k] matrix is
recomputed tile by tile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ejkernel.kernels.pallas.common import units
from ejkernel.kernels.pallas.gpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.gpu.flash_attention import operands, preference, tiles
from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward, backward_orders
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import OF_QUERIES, holds_rows
from ejkernel.kernels.pallas.gpu.flash_attention.forward import flash_forward
from ejkernel.kernels.pallas.gpu.flash_attention.tile_scheduler import known_order, with_lists
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import FlashTiles
from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.errors import ConfigError
from ejkernel.types import calls
from ejkernel.types.arrays import NO_LEVEL, precision_level
from ejkernel.types.attention.context.kernel import (
    ContextProblem,
    ContextTiles,
    GpuContextParallel,
)
from ejkernel.types.attention.mixins import FromLatent, SoftmaxKernel
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import arguments
from ejkernel.types.calls.shared_sequence import ShardedCall

DTYPES = ("float16", "bfloat16")
EIGHT_BIT_DIMS = (64, 128, 256)
DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))


def unsupported_8_bit(problem: Problem) -> str | None:
    """Returns why the kernel does not take a call of 8-bit operands, None if it does."""
    d, dv = problem.dim, problem.value_dim
    q_blocks, k_blocks = problem.scale_blocks or (1, 1)
    allowed = ", ".join(map(str, EIGHT_BIT_DIMS))
    lacking = {
        f"query: head dim {d} with value dim {dv} of 8 bits, only {allowed}": (
            d != dv or d not in EIGHT_BIT_DIMS
        ),
        "q_scale: blocks of queries are not supported": q_blocks > 1,
        "k_scale: blocks of keys are not supported": k_blocks > 1,
        f"out_dtype: {problem.output_dtype} is not supported": problem.output_dtype not in DTYPES,
        "logits_soft_cap: not supported with operands of 8 bits": problem.soft_cap is not None,
        "mask_info: segments are not supported with operands of 8 bits": problem.rules.arrays,
    }
    return next((reason for reason, lacks in lacking.items() if lacks), None)


class FlashAttention(SoftmaxKernel, PallasKernel):
    """Exact attention in memory linear in the lengths, on a Hopper GPU.

    q, k and v are float16 or bfloat16, promoted to one dtype, with head dims 64, 80, 96, 128, 192
    with values of 128, or 256. Masks are bands by index and segment ids. The tanh of a soft cap is
    the hardware's, exact to 2^-11. All additions have a fixed order, so two runs give the same
    bits. ``cfg``: ``fwd_params`` (q_blocksize, taken as 128; kv_blocksize, a multiple of 64;
    num_stages; or WarpgroupParams: 192 queries of three warpgroups where heads are 64 wide, and
    with 96 keys where they are 80 or 96 wide, 160 keys of two where heads are 128 wide and nothing
    is masked) and ``bwd_params`` (num_stages; blocks have one size for each head dim). Patterns of
    blocks take none of 80 and 96.

    Source: Shah et al. 2024, FlashAttention-3 (arXiv 2407.08608), section 3.
    """

    call = calls.FlashAttention
    reads = arguments.FLASH | arguments.PACKED | arguments.SCALED_OPERANDS | {"precision"}
    chip = staticmethod(current_chip)
    reads_warpgroups = True
    choose = staticmethod(tiles.choose)
    saved_axes = "batch heads q_len"

    def problem(self, a: Mapping[str, Any]) -> Problem:
        problem = super().problem(a)
        # matrix instructions have one precision, which is what every level means with 16 bits
        if precision_level(a.get("precision"), problem.dtype) is None:
            raise self.call.Unsupported(NO_LEVEL)
        return problem

    def variant_reason(self, problem: Problem) -> str | None:
        # other operations with these kernels do more around them
        return None if self.call is calls.FlashAttention else super().variant_reason(problem)

    def sequence_problem(self, problem: Problem) -> Problem:
        return replace(problem, batch=1)

    def fix_order(self, tiles: FlashTiles) -> FlashTiles:
        # where several tiles share a flag, one is computed again with maxima because another needs
        # it, of another row maybe
        fwd = replace(tiles.fwd, flag_per_tile=True)
        return replace(tiles, fwd=fwd, bwd=replace(tiles.bwd, one_way=True))

    def unsupported_reason(self, problem: Problem, target: Chip) -> str | None:
        d, dv, dtype, rules = problem.dim, problem.value_dim, problem.dtype, problem.rules
        if problem.is_eight_bit:
            reason = unsupported_8_bit(problem)
            if reason is not None:
                return reason
            dtype = problem.output_dtype
        allowed = ", ".join(f"{d} with {dv}" if d != dv else str(d) for d, dv in DIMS)
        lacking = {
            f"query: {dtype} is not supported, only {' and '.join(DTYPES)}": dtype not in DTYPES,
            f"query: head dim {d} with value dim {dv} is not among {allowed}": (d, dv) not in DIMS,
            "out_dtype: another than the inputs' is not supported": (
                problem.out_dtype is not None and not problem.is_eight_bit
            ),
            f"query: head dim {d} with a pattern of blocks is not supported": (
                problem.pattern_blocks is not None and d % 64 > 0
            ),
            "attention_mask: a dense mask is not supported": "mask" in rules.names,
            "mask_info: given positions are not supported": "q_positions" in rules.names,
            "mask_info: chunks are not supported": rules.chunk is not None,
        }
        return next((reason for reason, lacks in lacking.items() if lacks), None)

    def priority_for(self, call: BoundCall) -> int:
        """Behind the kernels for every GPU where those are faster."""
        problem = self.problem_of(call)
        # a shard of a sequence is computed in pieces
        pieces = getattr(problem, "calls", ((None, problem),))
        priorities = [preference.priority(p) for _, p in pieces]
        return max(priorities, key=priorities.count)

    def neighbours(
        self, problem: Problem, target: Chip, chosen: FlashTiles
    ) -> Iterable[FlashTiles]:
        for params in (
            {"q_blocksize": 128},
            {"kv_blocksize": 128},
            {"q_blocksize": 128, "kv_blocksize": 64, "num_stages": 3},
            {"num_stages": chosen.fwd.stages + 1},
        ):
            with contextlib.suppress(ConfigError):  # it does not fit
                yield chosen.apply_config({"fwd_params": params}, problem, target)

    def precompute(self, work: Work, arrays: Arrays) -> Arrays:
        pattern, mask = arrays.get("pattern"), arrays["mask"]
        if not isinstance(pattern, np.ndarray):
            return arrays
        p, t = work.problem, work.tiles
        forward = operands.forward_masks(mask, pattern, p, t.fwd)
        backward = operands.backward_masks(mask, pattern, p, t.bwd)
        if "lists" in forward:
            forward["order"] = known_order(forward["lists"][..., 1], p, work.target.cores)
            backward |= backward_orders(p, backward)
        return arrays | {"forward_lists": forward, "backward_lists": backward}

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, pattern = work.problem, work.tiles.fwd, arrays.get("pattern")
        names = ("q", "k", "v", *(f"{name}_scale" for name in "qkv" if p.is_eight_bit))
        tensors = {name: arrays[name] for name in names}
        tensors |= arrays.get("forward_lists") or operands.forward_masks(
            arrays["mask"], pattern, p, t
        )
        if "sink" in arrays:
            tensors["sink"] = arrays["sink"]

        def attend(problem: Problem, tensors: Arrays) -> Any:
            if problem.batch != p.batch:
                tensors.pop("order", None)  # the order of other rows
            tensors = with_lists(problem, tensors, work.target.cores)
            return flash_forward(problem, t, tensors, work.target.cores)

        o, lse, base = operands.folding(p, attend, tensors)
        return (o, lse), base

    def row_unit(self, problem: Problem) -> float:
        return units.unit(problem)

    def backward_tiles(self, work: Work) -> Iterable[tuple[int, int]]:
        return ((t.block_q, t.block_kv) for t in (work.tiles.bwd, OF_QUERIES))

    def finds_delta(self, work: Work) -> bool:
        """Returns whether the dq kernel computes delta: where it keeps its rows in registers."""
        return holds_rows(work.problem)

    def gradients(self, work: Work, arrays: Arrays) -> Arrays:
        p, t, pattern = work.problem, work.tiles.bwd, arrays.get("pattern")
        names = ("q", "k", "v", "do", "base", "delta", "o", "dlse")
        tensors = {name: arrays[name] for name in names if name in arrays}
        tensors |= arrays.get("backward_lists") or operands.backward_masks(
            arrays["mask"], pattern, p, t
        )

        def differentiate(problem: Problem, tensors: Arrays) -> Any:
            if problem.batch != p.batch:
                tensors = {name: x for name, x in tensors.items() if not name.endswith("_order")}
            return backward(problem, t, work.target.cores, **tensors)

        return dict(zip("qkv", operands.folding(p, differentiate, tensors), strict=True))


class ScaledDotProductAttention(FlashAttention):
    """The kernels of flash attention for the operation of this name, which has fewer options.

    Dtypes, head dims and masks are as in ``flash_attention``; tiles are the kernel's own choice.
    """

    call = calls.ScaledDotProductAttention
    reads = arguments.ATTENTION | arguments.PACKED
    fixed_tiles = True


class FlashMLA(FromLatent, FlashAttention):
    """The kernels of flash attention on keys and values expanded from latent rows; see
    ``mla_attention``.

    Dtypes, head dims (with the rotary part; of values), masks and ``cfg`` are as in
    ``flash_attention``. The backward pass expands again: no expanded array is saved.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    call = calls.FlashMLA
    reads = arguments.FLASH_MLA


flash_attention = FlashAttention()


class RingAttention(GpuContextParallel, PallasKernel):
    """Flash attention over a sequence that is sharded along a mesh axis, on Hopper GPUs.

    Call it inside ``shard_map``. Dtypes, head dims, masks and ``cfg`` are as in
    ``flash_attention``, which computes every piece of the visiting keys.
    """

    call = calls.RingAttention
    reads = arguments.RING | {"precision"}
    chip = staticmethod(current_chip)
    reads_warpgroups = True
    flash = flash_attention
    priority_for = FlashAttention.priority_for

    def choose(self, problem: ContextProblem, target: Chip) -> ContextTiles:
        """Returns tiles, ``guided`` in forward calls that run while keys or heads travel."""
        chosen = super().choose(problem, target)
        *steps, _ = problem.plan.schedule.order(problem.ring)
        sending = {p for step in steps for pieces in problem.plan.pieces[step] for p in pieces}
        calls = tuple(
            _guided(tiles) if piece in sending else tiles
            for (piece, _), tiles in zip(problem.calls, chosen.calls, strict=True)
        )
        exchanged = chosen.exchanged
        if exchanged is not None and problem.head_groups > 1:
            exchanged = _guided(exchanged)
        return replace(chosen, calls=calls, exchanged=exchanged)


def _guided(tiles: FlashTiles) -> FlashTiles:
    return replace(tiles, fwd=replace(tiles.fwd, guided=True))


ring_attention = RingAttention()
mla_attention = FlashMLA()
scaled_dot_product_attention = ScaledDotProductAttention()
for kernel in (flash_attention, mla_attention):
    kernel.context, kernel.sharded_call = ring_attention, ShardedCall
