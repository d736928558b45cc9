"""Block-sparse attention in XLA as one kernel object: every head loops over its own tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common import blockwise
from ejkernel.kernels.xla._common.blockwise_kernel import BlockwiseKernel
from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.tiles import Blocks, Passes
from ejkernel.kernels.xla.blocksparse_attention.head_loop import HeadLoop
from ejkernel.kernels.xla.blocksparse_attention.tiles import tile_of
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.varying import zeros
from ejkernel.types import calls
from ejkernel.types.attention.rows import DEAD, Rows, RowScales
from ejkernel.types.calls import arguments


class BlockSparseAttention(BlockwiseKernel):
    """Flash attention over the blocks that a pattern allows.

    Tiles without a visible pair are skipped, forward and backward, by each batch row and
    key/value head on its own. ``cfg``: ``q_blocksize`` and ``kv_blocksize`` of ``fwd_params`` and
    of ``bwd_params``, the tiles; by default they are fitted to the blocks. Differentiable in
    reverse mode in query, key, value, softmax_aux and bias, through o and lse.
    """

    call = calls.BlockSparseAttention
    reads = arguments.FLASH | arguments.PATTERN | arguments.DROPOUT | {"bias"}
    partitioned = True  # the compiler would end the loops of all devices together

    def choose(self, problem: Any, target: Any) -> Passes:
        q = tile_of(problem.q_block_size, problem.query.shape[1])
        blocks = Blocks(q, tile_of(problem.kv_block_size, problem.key.shape[1]))
        return Passes(blocks, blocks)

    def fields(self, chosen: Passes) -> dict[str, Any]:
        return {}  # tiles that fit a pattern are no powers of two

    def empty_outputs(self, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        q, k, v = (a[name] for name in ("query", "key", "value"))
        if 0 not in (*q.shape[:3], *k.shape[1:3]):
            return None
        lse = jnp.full(q.shape[:3], -jnp.inf, accumulation_dtype(q, k, v))
        return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), lse

    def rows(self, work: Work, arrays: Arrays) -> tuple[Any, Any, float]:
        loop = HeadLoop(work.problem, work.tiles.fwd, arrays, by_key=False)

        def attend_head(*x: Any, **options: Any) -> tuple:
            o, rows = blockwise.forward(loop.spec, *x, **options)
            return (o, *rows), None

        outputs = (loop.new_rows(arrays["value"].shape[-1]), loop.new_rows(), loop.new_rows())
        o, *rows = map(loop.from_rows, loop.map(attend_head, outputs)[0])
        return o, Rows(*rows), loop.spec.unit(arrays.get("bias"))

    def gradients(self, work: Work, arrays: Arrays, **rows: Any) -> Mapping[str, Any]:
        q, v, bias, saved = arrays["query"], arrays["value"], arrays.get("bias"), rows["row_scales"]
        loop = HeadLoop(work.problem, work.tiles.bwd, arrays, by_key=True)
        loop.sequences |= {
            "m": loop.rows(saved.m),
            "log2_scale": loop.rows(saved.log2_scale, DEAD),
            "delta": loop.rows(rows["delta"]),
            "do": loop.rows(rows["do"]),
        }

        def differentiate_head(
            *x: Any, m: jax.Array, log2_scale: jax.Array, **options: Any
        ) -> tuple:
            scales = RowScales(m, log2_scale)
            part = blockwise.backward(loop.spec, *x, row_scales=scales, **options)
            dq = part.dq if loop.factor == 1.0 else part.dq * loop.factor
            return (dq, part.dk, part.dv), part.dbias

        dbias = loop.head["bias"]
        if dbias is not None:
            q_len = 1 if dbias.shape[4] == 1 else loop.padded_q
            dbias = zeros((*dbias.shape[:4], q_len, loop.padded_kv), saved.m.dtype, q)
        dims = q.shape[-1], v.shape[-1]
        new = (loop.new_rows(dims[0]), *map(loop.new_keys, dims))
        (dq, dk, dv), dbias = loop.map(differentiate_head, new, dbias)
        grads = {
            "query": loop.from_rows(dq),
            "key": dk[:, : loop.kv_len],
            "value": dv[:, : loop.kv_len],
        }
        if bias is not None and dbias is not None:
            grads["bias"] = dbias[..., : loop.q_len, : loop.kv_len].reshape(bias.shape)
        return grads


blocksparse_attention = BlockSparseAttention()
