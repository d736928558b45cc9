"""Block-sparse attention in XLA as one kernel object: every head walks its own tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common import blockwise
from ejkernel.kernels.xla._common import softmax as sm
from ejkernel.kernels.xla._common.blockwise_kernel import BlockwiseKernel
from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.tiles import Blocks, Passes
from ejkernel.kernels.xla.blocksparse_attention.tiles import tile_of
from ejkernel.kernels.xla.blocksparse_attention.walk import Walk
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.varying import zeros
from ejkernel.types import calls
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
        walk = Walk(work.problem, work.tiles.fwd, arrays, by_key=False)

        def one(*x: Any, **options: Any) -> tuple:
            o, rows = blockwise.forward(walk.spec, *x, **options)
            return (o, *rows), None

        outputs = (walk.new_rows(arrays["value"].shape[-1]), walk.new_rows(), walk.new_rows())
        o, *rows = map(walk.from_rows, walk.map(one, outputs)[0])
        return o, sm.Rows(*rows), walk.spec.unit(arrays.get("bias"))

    def gradients(self, work: Work, arrays: Arrays, **given: Any) -> Mapping[str, Any]:
        q, v, bias, saved = arrays["query"], arrays["value"], arrays.get("bias"), given["shares"]
        walk = Walk(work.problem, work.tiles.bwd, arrays, by_key=True)
        walk.sequences |= {
            "m": walk.rows(saved.m),
            "share": walk.rows(saved.share, sm.DEAD),
            "delta": walk.rows(given["delta"]),
            "do": walk.rows(given["do"]),
        }

        def one(*x: Any, m: jax.Array, share: jax.Array, **options: Any) -> tuple:
            grads = blockwise.backward(walk.spec, *x, shares=sm.Shares(m, share), **options)
            dq = grads.dq if walk.factor == 1.0 else grads.dq * walk.factor
            return (dq, grads.dk, grads.dv), grads.dbias

        dbias = walk.head["bias"]
        if dbias is not None:
            rows = 1 if dbias.shape[4] == 1 else walk.padded_q
            dbias = zeros((*dbias.shape[:4], rows, walk.padded_kv), saved.m.dtype, q)
        dims = q.shape[-1], v.shape[-1]
        new = (walk.new_rows(dims[0]), *map(walk.new_keys, dims))
        (dq, dk, dv), dbias = walk.map(one, new, dbias)
        found = {
            "query": walk.from_rows(dq),
            "key": dk[:, : walk.kv_len],
            "value": dv[:, : walk.kv_len],
        }
        if bias is not None and dbias is not None:
            found["bias"] = dbias[..., : walk.q_len, : walk.kv_len].reshape(bias.shape)
        return found


blocksparse_attention = BlockSparseAttention()
