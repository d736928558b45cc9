"""Flash attention in XLA over the blockwise passes, on one device and on a ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.kernels.xla._common import blockwise
from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.blockwise_kernel import BlockwiseKernel
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla._common.mods import ModMask, TileScores
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types import calls, prepare_mask
from ejkernel.types.attention.context.kernel import ContextParallel
from ejkernel.types.calls import arguments
from ejkernel.types.calls.scaled_operands import (
    FLOAT8,
    dequantized,
    output_dtype,
)
from ejkernel.types.calls.shared_sequence import ShardedCall
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.mods import MODS, leaves_of


class FlashAttention(BlockwiseKernel):
    """Exact attention in memory linear in the lengths.

    Matmuls accumulate in float32, in float64 when an array or ``logits_dtype`` is float64.
    ``cfg``: ``q_blocksize`` and ``kv_blocksize`` of ``fwd_params`` and of ``bwd_params``.
    Differentiable in reverse mode in query, key, value, bias, softmax_aux and the arrays that a
    score_mod captures, through o and lse. Inputs of 8 bits are converted to float32 first.
    """

    by_rows = True

    call = calls.FlashAttention
    reads = (
        arguments.FLASH
        | arguments.PACKED
        | arguments.DROPOUT
        | arguments.SCALED_OPERANDS
        | {"bias", "precision", "logits_dtype", *MODS}
    )

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        """The arrays of the call, cumulative lengths joined with the mask."""
        packed = ("cum_seqlens_q", "cum_seqlens_k", "attention_mask")
        mask = a["mask_info"] if a["cum_seqlens_q"] is None else mask_of(a)
        arrays = {name: x for name, x in self.call.array_arguments(a).items() if name not in packed}
        leaves = leaves_of(*(arrays.pop(name, None) for name in MODS))
        return {**arrays, **leaves, "mask_info": mask}

    def rows(self, work: Work, arrays: Arrays) -> tuple[Any, Any, float]:
        spec, bias = Spec.from_problem(work.problem, work.tiles.fwd), arrays.get("bias")
        values = dequantized(arrays) if arrays["query"].dtype == FLOAT8 else arrays
        q, k, v = (values[name] for name in ("query", "key", "value"))
        o, rows = blockwise.forward(spec, q, k, v, bias, **_options(work, spec, arrays))
        return o, rows, spec.unit(bias)

    def output_dtype(self, work: Work, arrays: Arrays) -> Any:
        return output_dtype(arrays["query"].dtype, work.problem.out_dtype)

    def gradients(self, work: Work, arrays: Arrays, **rows: Any) -> Mapping[str, Any]:
        spec = Spec.from_problem(work.problem, work.tiles.bwd)
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        options = _options(work, spec, arrays)
        grads = blockwise.backward(spec, q, k, v, arrays.get("bias"), **rows, **options)
        by_name = {"query": grads.dq, "key": grads.dk, "value": grads.dv, "bias": grads.dbias}
        scores = options["scores"]
        if scores is not None:
            names = (work.problem.score_mod.names[i] for i in scores.smooth)
            by_name |= dict(zip(names, grads.dscores, strict=True))
        return {name: x for name, x in by_name.items() if name in arrays}


def _options(work: Work, spec: Spec, arrays: Arrays) -> dict[str, Any]:
    """Returns the mask in the blocks of a pass, the dropout and the score_mod."""
    q, k = arrays["query"], arrays["key"]
    layout = spec.layout(q, k)
    sizes = {"q_len": layout.q_len, "kv_len": layout.kv_len}
    blocks = {"block_q": layout.block_q, "block_kv": layout.block_kv}
    dropout = None
    if spec.dropout_prob > 0.0:
        seed = arrays.get("dropout_seed")
        dropout = Dropout.make(seed, layout.batch, q.shape[2], layout.q_len, layout.kv_len)
    mask: Any = prepare_mask(arrays["mask_info"], **sizes, **blocks)
    if work.problem.mask_mod is not None:
        mask = ModMask(mask, work.problem.mask_mod.mod(arrays), layout)
    score = work.problem.score_mod
    scores = None if score is None else TileScores(score.mod(arrays), layout)
    return {"mask": mask, "dropout": dropout, "scores": scores}


flash_attention = FlashAttention()


class RingAttention(ContextParallel, XlaKernel):
    """flash_attention over a sequence spread along a mesh axis.

    Call it inside ``shard_map``. Every array is this device's shard, ``bias`` and a dense mask
    with the keys of all devices; the result is its rows of flash_attention on the whole arrays.
    ``cfg``: as for flash_attention, which computes every piece of the visiting keys.
    Differentiable in reverse mode in query, key, value, bias and softmax_aux, through o and lse.
    """

    call = calls.RingAttention
    reads = arguments.RING | arguments.DROPOUT | {"bias", "precision", "logits_dtype"}
    flash = flash_attention


ring_attention = RingAttention()
flash_attention.context, flash_attention.sharded_call = ring_attention, ShardedCall
