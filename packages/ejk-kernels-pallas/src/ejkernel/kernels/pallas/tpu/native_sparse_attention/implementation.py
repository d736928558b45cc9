"""Native sparse attention on TPU: three branches, gated and added.

The compressed and the sliding branch are flash attention, over block means and over a window. The
selected branch and the choice of its blocks have kernels of their own. XLA computes the means, the
lists and the sum of the gated branches. All branches read the same rows, in the backward pass too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.flash_attention.implementation import DTYPES, MAX_DIM
from ejkernel.kernels.pallas.tpu.native_sparse_attention import problem as problems
from ejkernel.kernels.pallas.tpu.native_sparse_attention.branches import (
    OutputGradient,
    Rows,
    branches,
)
from ejkernel.kernels.pallas.tpu.native_sparse_attention.lists import by_register, row_sums
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import Problem, Tiles
from ejkernel.kernels.pallas.tpu.native_sparse_attention.select import (
    must_rank,
    select,
    select_bytes,
)
from ejkernel.ops.differentiate import Arrays, Work, compiled
from ejkernel.types import calls
from ejkernel.types.attention.softmax import name_lse, name_residuals
from ejkernel.types.calls import arguments
from ejkernel.types.masks.hidden import clear_unless
from ejkernel.types.problems.selected_blocks import chosen_blocks, sorts_blocks


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
    fixed_tiles = True

    def unsupported_reason(self, problem: Any, target: Chip) -> str | None:
        p = Problem.from_call(problem)
        if p.dtype not in DTYPES:
            return f"query: {p.dtype} is not supported, only {' and '.join(DTYPES)}"
        for argument, dim in (("query", p.dim), ("value", p.value_dim)):
            if dim > MAX_DIM:
                return f"{argument}: head dim {dim} is larger than {MAX_DIM}"
        ranks = problem.block_indices is None and must_rank(p, sorts_blocks(problem))
        if ranks and select_bytes(p) > target.tile_memory:
            means, queries = f"the means of {p.blocks} blocks", f"queries of {p.group} heads"
            return f"block_size: {means} do not fit into vector memory next to {queries}"
        return None

    def choose(self, problem: Any, target: Chip) -> Tiles:
        return problems.choose(Problem.from_call(problem), target)

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p, t, cu = work.problem, work.tiles, arrays.get("cu_seqlens")
        (b, s, h, _), dv = p.query.shape, p.value.shape[3]
        if 0 in p.query.shape or dv == 0 or (cu is not None and cu.shape[0] < 2):
            return (jnp.zeros((b, s, h, dv), p.query.dtype),), None
        rows = Rows.from_call(p, arrays)
        inner = Problem.from_call(p)

        def best() -> jax.Array:
            return select(inner, t, work.target, rows.q, rows.k, rows.blocks, sorts_blocks(p))

        chosen = name_lse(chosen_blocks(p, arrays, rows.blocks, best))
        out: Any = 0.0
        saved: dict[str, Any] = {}
        for name, branch in branches(work, rows, cu, chosen).items():
            o, base = name_residuals(*branch.attend())
            saved[name] = o, base
            out = out + _gated(t, rows.gates.get(name), o)
        # the barrier keeps XLA from moving the output as float32, twice the bytes
        out = lax.optimization_barrier(out.astype(p.query.dtype))
        out = out.reshape(b, s, h, dv) if t.joins_heads else out.swapaxes(1, 2)
        return (clear_unless(rows.is_token, out)[0],), (chosen, saved)

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        if saved is None:
            return {}
        p, t, (chosen, of_branches) = work.problem, work.tiles, saved
        rows = Rows.from_call(p, arrays)
        (do,) = clear_unless(rows.is_token, *cotangents)
        do = do.astype(rows.q.dtype)
        gates: dict[str, Any] = {}
        dq: Any = None
        dk: Any = 0.0
        dv: Any = 0.0
        for name, branch in branches(work, rows, arrays.get("cu_seqlens"), chosen).items():
            o, base = of_branches[name]
            delta = row_sums(t, do, o)
            output = OutputGradient(base, do, delta, rows.gates.get(name), dq)
            dq, *of_keys = branch.pull_back(output)
            dk, dv = (x + g.astype(jnp.float32) for x, g in zip((dk, dv), of_keys, strict=True))
            if name in rows.gates:
                gates[name] = delta
        gradients = {"query": dq, "key": dk, "value": dv, **gates}
        return dict(zip(gradients, clear_unless(rows.is_token, *gradients.values()), strict=True))


def _gated(t: Tiles, gate: jax.Array | None, o: jax.Array) -> jax.Array:
    """Returns a branch times its gate, float32, in the order in which kernels write it.

    Nothing is moved: ``[b, h, s, d]``, or ``by_register`` where heads are joined.
    """

    def as_written(x: jax.Array) -> jax.Array:
        return by_register(t, x) if t.joins_heads else x.swapaxes(1, 2)

    o = as_written(o).astype(jnp.float32)
    return o if gate is None else as_written(gate[..., None]) * o


native_sparse_attention = NativeSparseAttention()
