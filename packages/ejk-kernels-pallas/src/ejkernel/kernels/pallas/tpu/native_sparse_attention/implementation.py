"""Native sparse attention on TPU: three branches, gated and added.

The compressed and the sliding branch are flash attention, over block means and over a window. The
selected branch and the choice of its blocks have kernels of their own. XLA computes the means, the
lists and the sum of the gated branches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.flash_attention.implementation import (
    DTYPES,
    MAX_DIM,
    flash_attention,
)
from ejkernel.kernels.pallas.tpu.native_sparse_attention import problem as problems
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import Problem, Tiles
from ejkernel.kernels.pallas.tpu.native_sparse_attention.select import (
    must_rank,
    select,
    select_bytes,
)
from ejkernel.kernels.pallas.tpu.native_sparse_attention.selected import attend
from ejkernel.ops.differentiate import Arrays, Work, compiled
from ejkernel.types import calls
from ejkernel.types.arrays import result_dtype
from ejkernel.types.attention.softmax import name_lse
from ejkernel.types.calls import arguments
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.hidden import cleared
from ejkernel.types.masks.token_blocks import (
    Blocks,
    block_means,
    clean_indices,
    find_blocks,
    means_mask,
)


class NativeSparseAttention(PallasKernel):
    """Causal attention over compressed, selected and near keys, on a TPU.

    bfloat16 and float32, promoted to one dtype, with head dims up to 256; accumulation is float32.
    Two calls give the same bits. Memory is linear in the length. Differentiable once. Tiles are
    fixed: some tokens of which all query heads of a group make 128 rows.
    """

    call = calls.NativeSparseAttention
    reads = arguments.QKV | {
        "g_cmp",
        "g_slc",
        "g_swa",
        "block_indices",
        "block_counts",
        "block_size",
        "max_block_count",
        "cu_seqlens",
        "sliding_window",
        "softmax_scale",
    }
    chip = staticmethod(current_chip)
    outputs = staticmethod(compiled)
    has_backward = False  # its steps have their own gradients
    fixed_tiles = True

    def unsupported_reason(self, problem: Any, target: Chip) -> str | None:
        p = selected_problem(problem)
        if p.dtype not in DTYPES:
            return f"query: {p.dtype} is not supported, only {' and '.join(DTYPES)}"
        for argument, dim in (("query", p.dim), ("value", p.value_dim)):
            if dim > MAX_DIM:
                return f"{argument}: head dim {dim} is larger than {MAX_DIM}"
        ranks = problem.block_indices is None and must_rank(p, _sorts(problem))
        if ranks and select_bytes(p) > target.vmem // 4 * 3:
            return f"block_size: the means of {p.blocks} blocks do not fit into vector memory"
        return None

    def choose(self, problem: Any, target: Chip) -> Tiles:
        return problems.choose(selected_problem(problem), target)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, cu = work.problem, arrays.get("cu_seqlens")
        dtype = jnp.dtype(_dtype(p))
        q, k, v = (arrays[name].astype(dtype) for name in ("query", "key", "value"))
        (b, s, h, _), dv = q.shape, v.shape[3]
        if q.size == 0 or dv == 0 or (cu is not None and cu.shape[0] < 2):
            return (jnp.zeros((b, s, h, dv), p.query.dtype),), ()
        blocks = find_blocks(s, p.block_size, cu)
        valid = (blocks.sequence >= 0)[None] if blocks.packed else None
        q, k, v = cleared(valid, q, k, v)
        gates = {
            name: cleared(valid, arrays[name].astype(jnp.float32))[0][..., None]
            for name in ("g_cmp", "g_slc", "g_swa")
            if name in arrays
        }
        inner = replace(work, problem=selected_problem(p))
        chosen = _chosen(p, inner, arrays, q, k, blocks)
        o = attend(inner, {"q": q, "k": k, "v": v, "chosen": chosen, "blocks": blocks})
        out = gates.get("g_slc", 1.0) * o.astype(jnp.float32)
        if "g_cmp" in gates:
            means = (block_means(x, blocks).astype(dtype) for x in (k, v))
            o = _flash(p, q, *means, means_mask(blocks, b))
            out = out + gates["g_cmp"] * o.astype(jnp.float32)
        if p.sliding_window is not None:
            mask = {"query": q, "key": k, "cum_seqlens_q": cu, "causal": True}
            mask = mask_of({**mask, "sliding_window": p.sliding_window})
            o = _flash(p, q, k, v, mask)
            out = out + gates.get("g_swa", 1.0) * o.astype(jnp.float32)
        return (cleared(valid, out)[0].astype(p.query.dtype),), ()


def _flash(p: Any, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
    return flash_attention.run_canonical(
        query=q, key=k, value=v, mask_info=mask, softmax_scale=p.softmax_scale
    )


def _dtype(p: Any) -> str:
    return result_dtype(p.query.dtype, p.key.dtype, p.value.dtype).name


def _chosen(p: Any, work: Work, arrays: Arrays, q: Any, k: Any, blocks: Blocks) -> jax.Array:
    """Returns every token's blocks ``[b, s, hk, slots]``, each once, -1 for none."""
    counts = arrays.get("block_counts", p.block_counts)
    if p.block_indices is not None:
        if not isinstance(counts, int) and p.max_block_count is not None:
            counts = jnp.minimum(counts, p.max_block_count)
        return name_lse(clean_indices(arrays["block_indices"], counts, blocks))
    chosen = select(work.problem, work.target, q, k, blocks, _sorts(p))
    if not isinstance(counts, int):
        slot = jax.lax.broadcasted_iota(jnp.int32, chosen.shape, chosen.ndim - 1)
        chosen = jnp.where(slot < counts[..., None], chosen, -1)
    return name_lse(chosen)


def _sorts(p: Any) -> bool:
    """Returns whether the order of the chosen blocks matters: tokens have different counts."""
    return not isinstance(p.block_counts, int)


def selected_problem(p: Any) -> Problem:
    """Returns the problem of the selected branch of a call."""
    (b, s, h, d), hk, dv = p.query.shape, p.key.shape[2], p.value.shape[3]
    sequences = 0 if p.cu_seqlens is None else p.cu_seqlens.shape[0] - 1
    longest = -(-s // p.block_size)
    if p.block_indices is not None:
        slots = p.block_indices.shape[3]
    else:
        bound = p.block_counts if isinstance(p.block_counts, int) else p.max_block_count
        slots = max(1, longest if bound is None else min(bound, longest))
    return Problem(
        b, s, h, hk, d, dv, p.block_size, longest + sequences, slots, float(p.softmax_scale),
        _dtype(p), p.cu_seqlens is not None,
    )  # fmt: skip


native_sparse_attention = NativeSparseAttention()
