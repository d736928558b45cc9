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
from jax import lax

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.flash_attention.implementation import (
    DTYPES,
    MAX_DIM,
    flash_attention,
)
from ejkernel.kernels.pallas.tpu.native_sparse_attention import problem as problems
from ejkernel.kernels.pallas.tpu.native_sparse_attention.lists import by_register
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import Problem, Tiles
from ejkernel.kernels.pallas.tpu.native_sparse_attention.select import (
    must_rank,
    select,
    select_bytes,
)
from ejkernel.kernels.pallas.tpu.native_sparse_attention.selected import attend
from ejkernel.ops.differentiate import Arrays, Work, compiled
from ejkernel.types import calls
from ejkernel.types.attention.softmax import name_lse
from ejkernel.types.calls import arguments
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.hidden import cleared
from ejkernel.types.masks.token_blocks import (
    block_means,
    find_blocks,
    means_mask,
)
from ejkernel.types.problems.selected_blocks import chosen_blocks, promoted_dtype, sorts_blocks


class NativeSparseAttention(PallasKernel):
    """Causal attention over compressed, selected and near keys, on a TPU.

    bfloat16 and float32, promoted to one dtype, with head dims up to 256; accumulation is float32.
    Two calls give the same bits. Memory is linear in the length. Differentiable once. Tiles are
    fixed: some tokens of which all query heads of a group make 128 rows.
    """

    call = calls.NativeSparseAttention
    reads = arguments.NATIVE_SPARSE
    chip = staticmethod(current_chip)
    outputs = staticmethod(compiled)
    has_backward = False  # its steps have their own gradients
    fixed_tiles = True

    def unsupported_reason(self, problem: Any, target: Chip) -> str | None:
        p = Problem.from_call(problem)
        if p.dtype not in DTYPES:
            return f"query: {p.dtype} is not supported, only {' and '.join(DTYPES)}"
        for argument, dim in (("query", p.dim), ("value", p.value_dim)):
            if dim > MAX_DIM:
                return f"{argument}: head dim {dim} is larger than {MAX_DIM}"
        ranks = problem.block_indices is None and must_rank(p, sorts_blocks(problem))
        if ranks and select_bytes(p) > target.vmem // 4 * 3:
            return f"block_size: the means of {p.blocks} blocks do not fit into vector memory"
        return None

    def choose(self, problem: Any, target: Chip) -> Tiles:
        return problems.choose(Problem.from_call(problem), target)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, cu = work.problem, work.tiles, arrays.get("cu_seqlens")
        dtype = jnp.dtype(promoted_dtype(p))
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
        inner = replace(work, problem=Problem.from_call(p))

        def best() -> jax.Array:
            return select(inner.problem, t, work.target, q, k, blocks, sorts_blocks(p))

        chosen = chosen_blocks(p, arrays, blocks, best)
        chosen = name_lse(chosen)
        o = attend(inner, {"q": q, "k": k, "v": v, "chosen": chosen, "blocks": blocks})
        out = _gated(t, gates.get("g_slc"), o)
        if "g_cmp" in gates:
            means = (block_means(x, blocks).astype(dtype) for x in (k, v))
            o = _flash(p, t, q, *means, means_mask(blocks, b))
            out = out + _gated(t, gates["g_cmp"], o)
        if p.sliding_window is not None:
            mask = {"query": q, "key": k, "cum_seqlens_q": cu, "causal": True}
            mask = mask_of({**mask, "sliding_window": p.sliding_window})
            o = _flash(p, t, q, k, v, mask)
            out = out + _gated(t, gates.get("g_swa"), o)
        # the barrier keeps XLA from moving the gradient as float32, twice the bytes
        out = lax.optimization_barrier(out.astype(p.query.dtype))
        out = out.reshape(b, s, h, dv) if t.joins_heads else out.swapaxes(1, 2)
        return (cleared(valid, out)[0],), ()


def _gated(t: Tiles, gate: jax.Array | None, o: jax.Array) -> jax.Array:
    """Returns a branch times its gate, float32, in the order in which kernels write it.

    Nothing is moved: ``[b, h, s, d]``, or ``by_register`` where heads are joined.
    """

    def as_written(x: jax.Array) -> jax.Array:
        return by_register(t, x) if t.joins_heads else x.swapaxes(1, 2)

    o = as_written(o).astype(jnp.float32)
    return o if gate is None else as_written(gate) * o


def _flash(p: Any, t: Tiles, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
    cfg = {"joins_heads": True} if t.joins_heads else None
    return flash_attention.run_canonical(
        cfg=cfg, query=q, key=k, value=v, mask_info=mask, softmax_scale=p.softmax_scale
    )


native_sparse_attention = NativeSparseAttention()
