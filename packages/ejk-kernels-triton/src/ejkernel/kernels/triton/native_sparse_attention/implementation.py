"""Native sparse attention in Triton: three branches, gated and added.

The compressed and the sliding branch are flash attention, over block means and over a window. The
selected branch has kernels of its own, whose forward pass adds all three with their gates. XLA
computes the means and the gradients of gates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.kernel import TritonKernel, unsupported_operands
from ejkernel.kernels.triton.native_sparse_attention import tiles
from ejkernel.kernels.triton.native_sparse_attention.branches import compressed, sliding
from ejkernel.kernels.triton.native_sparse_attention.lists import sort_lists
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem
from ejkernel.kernels.triton.native_sparse_attention.select import select
from ejkernel.kernels.triton.native_sparse_attention.selected import attend
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work, compiled
from ejkernel.types import calls
from ejkernel.types.attention.softmax import name_lse
from ejkernel.types.calls import arguments
from ejkernel.types.masks.hidden import clear_unless
from ejkernel.types.masks.token_blocks import (
    find_blocks,
)
from ejkernel.types.problems.selected_blocks import chosen_blocks, promoted_dtype, sorts_blocks


class NativeSparseAttention(TritonKernel):
    """Causal attention over compressed, selected and near keys, on a GPU.

    float16, bfloat16 and float32, promoted to one dtype, with head dims that are multiples of 8 up
    to 256; accumulation is float32. There are no atomics: two calls give the same bits. Memory is
    linear in the length. ``cfg``, of the selected branch: kv_tile; num_warps and num_stages of the
    forward pass and of the gradient of queries; q_tile, the rows (tokens times query heads) of a
    step of the gradients of keys and values. Differentiable once.
    """

    call = calls.NativeSparseAttention
    reads = arguments.NATIVE_SPARSE
    outputs = staticmethod(compiled)
    has_backward = False  # its steps have their own gradients

    def unsupported_reason(self, problem: Any, target: Target) -> str | None:
        dims = {"query": problem.query.shape[3], "value": problem.value.shape[3]}
        return unsupported_operands({"query": promoted_dtype(problem)}, dims)

    def choose(self, problem: Any, target: Target) -> tiles.SparseTiles:
        return tiles.choose(Problem.from_call(problem), target)

    def neighbours(self, problem: Any, target: Target, chosen: Any) -> Iterable[tiles.SparseTiles]:
        return tiles.neighbours(Problem.from_call(problem), target, chosen)

    def apply_config(
        self, chosen: Any, cfg: Any, problem: Any, target: Target
    ) -> tiles.SparseTiles:
        return chosen.apply_config(cfg, Problem.from_call(problem), target)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, cu = work.problem, arrays.get("cu_seqlens")
        dtype = jnp.dtype(promoted_dtype(p))
        q, k, v = (arrays[name].astype(dtype) for name in ("query", "key", "value"))
        (b, s, h, _), dv = q.shape, v.shape[3]
        if q.size == 0 or dv == 0 or (cu is not None and cu.shape[0] < 2):
            return (jnp.zeros((b, s, h, dv), p.query.dtype),), ()
        blocks = find_blocks(s, p.block_size, cu)
        valid = (blocks.sequence >= 0)[None] if blocks.packed else None
        q, k, v = clear_unless(valid, q, k, v)
        others = {
            name: clear_unless(valid, arrays[name].astype(jnp.float32))[0]
            for name in ("g_cmp", "g_slc", "g_swa")
            if name in arrays
        }
        inner = replace(work, problem=Problem.from_call(p))

        def best() -> jax.Array:
            return select(inner.problem, work.target, q, k, blocks, sorts_blocks(p))

        chosen = chosen_blocks(p, arrays, blocks, best)
        if p.block_indices is not None:
            chosen = sort_lists(chosen)
        chosen = name_lse(chosen)
        if "g_cmp" in others:
            others |= compressed(p, work.target.cores, q, k, v, blocks)
        if p.sliding_window is not None:
            others |= sliding(p, q, k, v, cu)
        selected = {"q": q, "k": k, "v": v, "chosen": chosen, "places": blocks}
        out = attend(inner, selected | others)
        return (clear_unless(valid, out)[0].astype(p.query.dtype),), ()


native_sparse_attention = NativeSparseAttention()
