"""Flash attention in Triton as one kernel object: its arguments, its tiles, its launches.

Residuals are q, k, v, o, the lse of every row and the arguments of the call; the [q, k] matrix is
recomputed tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.common.dropout_rows import row_words
from ejkernel.kernels.triton.common.precision import precision_name, refused_precision
from ejkernel.kernels.triton.flash_attention import lists, mods, single_row, tiles
from ejkernel.kernels.triton.flash_attention.dbias_kernel import DbiasLaunch
from ejkernel.kernels.triton.flash_attention.dkv_kernel import DkvLaunch
from ejkernel.kernels.triton.flash_attention.dq_kernel import DqLaunch
from ejkernel.kernels.triton.flash_attention.eight_bit_operands import (
    FLOAT8,
    has_8_bit_matmuls,
    tokens_innermost,
)
from ejkernel.kernels.triton.flash_attention.fits import neighbours
from ejkernel.kernels.triton.flash_attention.forward_kernel import ForwardLaunch
from ejkernel.kernels.triton.flash_attention.launch import AttentionLaunch, is_fused
from ejkernel.kernels.triton.flash_attention.static_lists import build_static_lists, list_key
from ejkernel.kernels.triton.flash_attention.terms import (
    logit_shift,
    logit_unit,
    natural_logarithm,
    row_terms,
)
from ejkernel.kernels.triton.flash_attention.tiles import Tiles
from ejkernel.kernels.triton.kernel import DTYPES, TritonKernel, unsupported_operands
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.kernel_registry import kernel_registry
from ejkernel.types import calls
from ejkernel.types.attention.context.kernel import GpuContextParallel
from ejkernel.types.attention.mixins import SoftmaxKernel
from ejkernel.types.attention.problem import Problem
from ejkernel.types.attention.rows import LN2
from ejkernel.types.calls import arguments
from ejkernel.types.calls.shared_sequence import ShardedCall
from ejkernel.types.calls.softmax import QKV
from ejkernel.types.masks.structure import HULL, LISTED, block_ranges, operands, split_mask
from ejkernel.types.mod_blocks import known_blocks
from ejkernel.types.mods import MODS, is_float


class FlashAttention(SoftmaxKernel, TritonKernel):
    """Exact attention in memory linear in the lengths, on a GPU.

    q, k and v are float16, bfloat16 or float32, promoted to one dtype, with head dims that are
    multiples of 8 up to 256, or of 8 bits with scales (see ``eight_bit_operands``). Accumulators
    are float32. Nothing is summed by atomics, so two runs give the same bits. ``cfg``:
    ``fwd_params`` (q_blocksize, kv_blocksize, num_warps, num_stages) and ``bwd_params`` (the same
    for the key gradients; blocksize_m and blocksize_n, with the same warps and stages, for the
    query gradient).
    """

    call = calls.FlashAttention
    reads = (
        arguments.FLASH
        | arguments.PACKED
        | arguments.DROPOUT
        | arguments.SCALED_OPERANDS
        | {"bias", "precision", *MODS}
    )
    choose = staticmethod(tiles.choose)
    neighbours = staticmethod(neighbours)
    saved_axes = "batch heads q_len"

    def problem(self, a: Mapping[str, Any]) -> Problem:
        problem = self.call.problem(a)
        if problem.dtype == FLOAT8 and not has_8_bit_matmuls(problem, self.target()):
            problem = replace(problem, dtype="bfloat16")  # which holds every value
        return replace(problem, precision=precision_name(a.get("precision"), problem.dtype))

    def variant_reason(self, problem: Any) -> str | None:
        # other operations with these kernels do more around them
        return None if self.call is calls.FlashAttention else super().variant_reason(problem)

    def sequence_problem(self, problem: Any) -> Any:
        return replace(problem, batch=1)

    def fix_order(self, tiles: Any) -> Any:
        decode = tiles.decode
        return tiles if decode is None else replace(tiles, decode=single_row.fix_order(decode))

    def operands(self, a: Mapping[str, Any], problem: Problem) -> Arrays:
        operands = super().operands(a, problem)
        if problem.dtype == FLOAT8:
            operands["v"] = tokens_innermost(operands["v"])
        return operands

    def unsupported_reason(self, problem: Problem, target: Target) -> str | None:
        dims = {"query": problem.dim, "value": problem.value_dim}
        reason = unsupported_operands({"query": problem.dtype}, dims, (*DTYPES, FLOAT8), least=8)
        reason = reason or _unsupported_output(problem)
        reason = reason or refused_precision(problem.precision)
        if reason is None and (problem.score_mod is not None or problem.mask_mod is not None):
            reason = mods.unsupported_reason(problem)
        return reason

    def notes_on(self, problem: Problem, target: Target) -> tuple[str, ...]:
        if uses_lists(problem, target):
            return (LISTED,)
        return (HULL,) if problem.rules.arrays else ()

    def precompute(self, work: Work, arrays: Arrays) -> Arrays:
        p, t, pattern = work.problem, work.tiles, arrays.get("pattern")
        states = None if p.mask_mod is None else _mask_mod_states(p, arrays)
        inputs = [x for x in (pattern, states) if x is not None]
        if not inputs or not all(isinstance(x, np.ndarray) for x in inputs) or t.decode is not None:
            return arrays
        key_tiles = (tile for _, tile in _key_passes(work))
        passes = ((t.fwd, False), (t.dq, False), *((tile, True) for tile in key_tiles))
        return arrays | {"lists": build_static_lists(p, arrays["mask"], pattern, passes, states)}

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
        gradients = dict(super().backward(work, arrays, outputs, saved, cotangents))
        return gradients | _captured_gradients(work, arrays, lambda *_: cotangents)

    def partial_gradients(self, work, arrays, *, scales, delta, dlse, o, do) -> Arrays:
        rows = {"scales": scales, "delta": delta, "dlse": dlse, "o": o, "do": do}
        gradients = super().partial_gradients(work, arrays, **rows)
        lse = scales.m * self.row_unit(work.problem) - scales.log2_scale * LN2

        def of_part(o: Any, part_lse: Any) -> tuple[Any, Any]:
            seen = scales.alive & (part_lse != -jnp.inf)
            weight = jnp.where(seen, jnp.exp(jnp.where(seen, part_lse - lse, 0.0)), 0.0)
            wide = do.astype(jnp.float32) * weight[..., None]
            return wide, (wide * o.astype(jnp.float32)).sum(-1) - weight * delta

        return gradients | _captured_gradients(work, arrays, of_part, heads_first=False)

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
        p, t = work.problem, work.tiles
        base, *base_tail = arrays["base"]
        replaced = ("sink", "base", "do", "delta")
        tensors = {name: x for name, x in arrays.items() if name not in replaced}
        do = arrays["do"].astype(p.dtype)
        rows = row_terms(p, do, arrays["delta"], *(base_tail or [None]))
        tensors |= {"base": base, **rows}
        launch, operands = _with_operands(DqLaunch, work, t.dq, tensors)
        grads = call(launch, **operands)
        for parts, tile in _key_passes(work):
            launch, operands = _with_operands(DkvLaunch, work, tile, tensors, parts=parts)
            grads |= call(launch, **operands)
        bias = arrays.get("bias")
        if bias is not None:
            shared = dict(sum_batch=p.batch // bias.shape[0], sum_heads=p.heads // bias.shape[1])
            tile = tiles.bias_tiles(t.dq, work.target)
            launch, operands = _with_operands(DbiasLaunch, work, tile, tensors, **shared)
            grads |= call(launch, **operands)
        return {name.removeprefix("d"): gradient for name, gradient in grads.items()}


def _unsupported_output(problem: Problem) -> str | None:
    """Returns why the kernel does not store this output, None if it does."""
    dtype = problem.output_dtype
    if dtype in DTYPES:
        return None
    return f"out_dtype: {dtype} is not supported, only {', '.join(DTYPES)}"


def _key_passes(work: Work) -> Iterable[tuple[tuple[str, ...], Tiles]]:
    """Returns the gradients of keys and values that each launch computes, and its tiles."""
    return tiles.key_passes(work.problem, work.tiles.dkv, work.target)


def _captured_gradients(
    work: Work,
    arrays: Arrays,
    cotangents_of: Callable[[Any, Any], tuple[Any, ...]],
    *,
    heads_first: bool = True,
) -> Arrays:
    """Returns the gradients of the floats that a score_mod captures, by XLA.

    ``cotangents_of``: returns the cotangents of o ``[b, q, h, dv]`` and of lse ``[b, h, q]``,
    or ``[b, q, h]`` without ``heads_first``.

    Each element may be read by any pair, in any order: sums without atomics would need a kernel for
    every function. A program that does not use them does not compute them.
    """
    form = work.problem.score_mod
    names = () if form is None else form.names
    floats = {name: arrays[name] for name in names if is_float(arrays[name])}
    if form is None or not floats:
        return {}
    reference: Any = kernel_registry.get(work.kernel.call.name, "xla")
    canonical = {letter: arrays[letter] for letter in QKV}
    canonical = {QKV[letter]: x for letter, x in canonical.items()} | {"mask_info": arrays["mask"]}
    if "bias" in arrays:
        canonical["bias"] = arrays["bias"]
    if "sink" in arrays:
        canonical["softmax_aux"] = arrays["sink"].T
    if "seed" in arrays:
        canonical["dropout_seed"] = arrays["seed"][0]
    if work.problem.mask_mod is not None:
        canonical["mask_mod"] = work.problem.mask_mod.mod(arrays)
    options = work.options._asdict() | canonical | {"return_lse": True}

    def attend(floats: Arrays) -> Any:
        mod = form.mod(arrays | floats)
        o, lse = reference.run_canonical(**(options | {"score_mod": mod}))
        return o, lse.swapaxes(1, 2) if heads_first else lse

    (o, lse), pull_back = jax.vjp(attend, floats)
    do, dlse = cotangents_of(o, lse)
    return pull_back((do.astype(o.dtype), dlse.astype(lse.dtype)))[0]


def uses_lists(problem: Problem, target: Target) -> bool:
    """Returns whether tiles are visited by lists."""
    if problem.pattern_blocks is not None or problem.mask_mod_blocks:
        return True
    # the pointers of a dense mask leave no registers for a list, except on Hopper
    return "mask" in problem.rules.names and target.hopper


def _mask_mod_states(problem: Problem, tensors: Arrays) -> Any:
    """Returns the known blocks of a mask_mod, None where there are none."""
    p, mod = problem, problem.mask_mod.mod(tensors)
    states = known_blocks(mod, p.q_len, p.kv_len, batch=p.batch, heads=p.heads)
    return None if states is None else states[0]


def _forward(work: Work, arrays: Arrays) -> tuple[AttentionLaunch, dict[str, Any]]:
    """Returns the forward launch and its operands."""
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
    states = None if p.mask_mod is None else _mask_mod_states(p, tensors)
    tensors.pop("mask_mod_blocks", None)
    if not kind.iterates:
        # every tile is computed, each with its element mask
        masks, fields["mask_block"] = lists.element_mask(p, pattern, dense)
        tensors |= masks
    elif uses_lists(p, work.target):
        tile_lists = static_lists.get(list_key(tile, kind.by_key)) or lists.list_operands(
            p, mask, pattern, tile, by_key=kind.by_key, states=states
        )
        masks, fields["mask_block"] = lists.element_mask_for_lists(p, pattern, dense, tile)
        tensors |= tile_lists | masks
    elif rules.arrays:
        tensors["ranges"] = block_ranges(
            mask, p.q_len, p.kv_len, tile.block_q, tile.block_kv, transposed=kind.by_key
        )
    return kind(p, rules, tile, **fields), tensors


flash_attention = FlashAttention()


class RingAttention(GpuContextParallel, TritonKernel):
    """Flash attention over a sequence that is sharded along a mesh axis.

    Call it inside ``shard_map``. Dtypes, head dims and ``cfg`` are as in ``flash_attention``,
    which computes every piece of the visiting keys.
    """

    call = calls.RingAttention
    reads = arguments.RING | arguments.DROPOUT | {"bias", "precision"}
    flash = flash_attention


ring_attention = RingAttention()
flash_attention.context, flash_attention.sharded_call = ring_attention, ShardedCall
