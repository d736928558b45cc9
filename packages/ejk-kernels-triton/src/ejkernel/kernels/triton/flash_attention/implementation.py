"""Flash attention in Triton as one kernel object: its arguments, its tiles, its launches.

Residuals are q, k, v, o, the lse of every row and the arguments of the call; the [q, k] matrix is
recomputed tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.common.dropout_rows import row_words
from ejkernel.kernels.triton.common.products import precision_name, refused_precision
from ejkernel.kernels.triton.flash_attention import lists, single_row, tiles
from ejkernel.kernels.triton.flash_attention.fits import neighbours
from ejkernel.kernels.triton.flash_attention.launch import AttentionLaunch, is_fused
from ejkernel.kernels.triton.flash_attention.static_lists import build_static_lists, list_key
from ejkernel.kernels.triton.flash_attention.terms import (
    logit_shift,
    logit_unit,
    natural_logarithm,
    row_terms,
)
from ejkernel.kernels.triton.flash_attention.tiles import Tiles
from ejkernel.kernels.triton.kernel import TritonKernel, unsupported
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls
from ejkernel.types.attention.context.kernel import ContextParallel
from ejkernel.types.attention.mixins import SoftmaxKernel
from ejkernel.types.attention.problem import Problem
from ejkernel.types.attention.rows import LN2
from ejkernel.types.calls import arguments
from ejkernel.types.masks.structure import HULL, LISTED, block_ranges, operands, split_mask


class FlashAttention(SoftmaxKernel, TritonKernel):
    """Exact attention in memory linear in the lengths, on a GPU.

    q, k and v are float16, bfloat16 or float32, promoted to one dtype, with head dims that are
    multiples of 8 up to 256; accumulators are float32. Nothing is summed by atomics, so two runs
    give the same bits. ``cfg``: ``fwd_params`` (q_blocksize, kv_blocksize, num_warps, num_stages)
    and ``bwd_params`` (the same for the key gradients; blocksize_m and blocksize_n, with the same
    warps and stages, for the query gradient).
    """

    call = calls.FlashAttention
    reads = arguments.FLASH | arguments.PACKED | arguments.DROPOUT | {"bias", "precision"}
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(neighbours)
    saved_axes = "batch heads q_len"

    def problem(self, a: Mapping[str, Any]) -> Problem:
        problem = self.call.problem(a)
        return replace(problem, precision=precision_name(a.get("precision"), problem.dtype))

    def unsupported_reason(self, problem: Problem, target: Target) -> str | None:
        dims = {"query": problem.dim, "value": problem.value_dim}
        reason = unsupported({"query": problem.dtype}, dims, least=8)
        return reason or refused_precision(problem.precision)

    def notes_on(self, problem: Problem, target: Target) -> tuple[str, ...]:
        if uses_lists(problem, target):
            return (LISTED,)
        return (HULL,) if problem.rules.arrays else ()

    def precompute(self, work: Work, arrays: Arrays) -> Arrays:
        p, t, pattern = work.problem, work.tiles, arrays.get("pattern")
        if not isinstance(pattern, np.ndarray) or t.decode is not None:
            return arrays
        key_tiles = (tile for _, tile in _key_passes(work))
        passes = ((t.fwd, False), (t.dq, False), *((tile, True) for tile in key_tiles))
        return arrays | {"lists": build_static_lists(p, arrays["mask"], pattern, passes)}

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        if work.tiles.decode is not None:
            return single_row.forward(work, arrays), []
        launch, operands = _forward(work, arrays)
        o, lse, *saved = call(launch, **operands).values()
        return (o, lse), saved

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        if work.tiles.decode is not None:  # decoding saves no residuals
            launch, operands = _forward(work, arrays)
            o, lse, *saved = call(launch, **operands).values()
            outputs = o, lse
        return super().backward(work, arrays, outputs, saved, cotangents)

    def row_unit(self, problem: Problem) -> float:
        return LN2 if is_fused(problem) else logit_unit(problem)

    def row_shift(self, problem: Problem) -> float:
        return natural_logarithm(logit_shift(problem)) / self.row_unit(problem)

    def saved_rows(self, rows: list[Any]) -> list[Any]:
        return rows

    def backward_tiles(self, work: Work) -> Iterable[tuple[int, int]]:
        key_tiles = (tile for _, tile in _key_passes(work))
        return ((tile.block_q, tile.block_kv) for tile in (work.tiles.dq, *key_tiles))

    def gradients(self, work: Work, arrays: Arrays) -> Arrays:
        from ejkernel.kernels.triton.flash_attention.dkv_kernel import DkvLaunch
        from ejkernel.kernels.triton.flash_attention.dq_kernel import DqLaunch

        p, t = work.problem, work.tiles
        base, *base_tail = arrays["base"]
        replaced = ("sink", "base", "do", "delta")
        tensors = {name: x for name, x in arrays.items() if name not in replaced}
        rows = row_terms(p, arrays["do"], arrays["delta"], *(base_tail or [None]))
        tensors |= {"base": base, **rows}
        launch, operands = _with_operands(DqLaunch, work, t.dq, tensors)
        grads = call(launch, **operands)
        for parts, tile in _key_passes(work):
            launch, operands = _with_operands(DkvLaunch, work, tile, tensors, parts=parts)
            grads |= call(launch, **operands)
        bias = arrays.get("bias")
        if bias is not None:
            from ejkernel.kernels.triton.flash_attention.dbias_kernel import DbiasLaunch

            shared = dict(sum_batch=p.batch // bias.shape[0], sum_heads=p.heads // bias.shape[1])
            tile = tiles.bias_tiles(t.dq, work.target)
            launch, operands = _with_operands(DbiasLaunch, work, tile, tensors, **shared)
            grads |= call(launch, **operands)
        return {name.removeprefix("d"): gradient for name, gradient in grads.items()}


def _key_passes(work: Work) -> Iterable[tuple[tuple[str, ...], Tiles]]:
    """Returns the gradients of keys and values that each launch computes, and its tiles."""
    return tiles.key_passes(work.problem, work.tiles.dkv, work.target)


def uses_lists(problem: Problem, target: Target) -> bool:
    """Returns whether tiles are visited by lists."""
    # the pointers of a dense mask leave no registers for a list, except on Hopper
    return problem.pattern_blocks is not None or ("mask" in problem.rules.names and target.hopper)


def _forward(work: Work, arrays: Arrays) -> tuple[AttentionLaunch, dict[str, Any]]:
    """Returns the forward launch and its operands."""
    from ejkernel.kernels.triton.flash_attention.forward_kernel import ForwardLaunch

    return _with_operands(ForwardLaunch, work, work.tiles.fwd, arrays)


def _with_operands(
    kind: type[AttentionLaunch], work: Work, tile: Tiles, tensors: Arrays, **fields: Any
) -> tuple[AttentionLaunch, dict[str, Any]]:
    """Returns a launch and its operands; the blocks that it visits follow from the mask."""
    p, tensors = work.problem, dict(tensors)
    mask = tensors.pop("mask")
    rules, arrays = split_mask(mask)
    if "seed" in tensors:
        tensors["words"] = row_words(tensors.pop("seed"), p.batch, p.heads, p.q_len)
    tensors |= operands(mask, arrays, p.q_len, p.kv_len)
    pattern, dense = tensors.pop("pattern", None), tensors.get("mask")
    static_lists = tensors.pop("lists", {})
    if not kind.iterates:
        # every tile is computed, each with its element mask
        masks, fields["mask_block"] = lists.element_mask(p, pattern, dense)
        tensors |= masks
    elif uses_lists(p, work.target):
        tile_lists = static_lists.get(list_key(tile, kind.by_key)) or lists.list_operands(
            p, mask, pattern, tile, by_key=kind.by_key
        )
        masks, fields["mask_block"] = lists.element_mask_for_lists(p, pattern, dense, tile)
        tensors |= tile_lists | masks
    elif rules.arrays:
        tensors["ranges"] = block_ranges(
            mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, transposed=kind.by_key
        )
    return kind(p, rules, tile, **fields), tensors


flash_attention = FlashAttention()


class RingAttention(ContextParallel, TritonKernel):
    """Flash attention over a sequence that is sharded along a mesh axis.

    Call it inside ``shard_map``. Dtypes, head dims and ``cfg`` are as in ``flash_attention``,
    which computes every piece of the visiting keys.
    """

    call = calls.RingAttention
    reads = arguments.RING | arguments.DROPOUT | {"bias", "precision"}
    flash = flash_attention


ring_attention = RingAttention()
