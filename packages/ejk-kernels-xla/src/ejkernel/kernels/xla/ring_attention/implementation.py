"""Ring attention in XLA as one kernel object: blockwise attention a step, joined over the ring.

    forward   output and normaliser of the visiting keys are merged into the running pair, in the
              accumulation dtype; sinks are counted once, at the end.
    backward  dq stays; k and v travel again, and with them the accumulators dk and dv, one step
    behind,
              which arrive at the device that owns the keys. Every part uses the normaliser of the
              whole row, so the gradients of the parts add up.

The next keys are requested before the current ones are used, so that communication can overlap
with computation. Keys that no local query sees cost no matmul: their range of blocks is empty.

Memory is O(local q_len + kv_len) plus the caller's bias and its gradient. With zigzag order and
a causal mask every device has the same work; the blocks are fitted to the two chunks so that
blocks after the diagonal are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common import blockwise
from ejkernel.kernels.xla._common import softmax as sm
from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.blockwise_kernel import BlockwiseKernel
from ejkernel.kernels.xla._common.dots import accumulation_dtype
from ejkernel.kernels.xla._common.dropout import Dropout
from ejkernel.kernels.xla._common.tiles import Blocks
from ejkernel.kernels.xla.ring_attention import masks
from ejkernel.kernels.xla.ring_attention.ring import Ring, Schedule, run_steps
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.varying import vary, vary_alike, varying_axes
from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls import arguments
from ejkernel.types.masks.blocks import cdiv


class RingAttention(BlockwiseKernel):
    """flash_attention over a sequence spread along a mesh axis.

    Call it inside ``shard_map``. Every array is this device's shard, ``bias`` and a dense mask
    with the keys of all devices; the result is its rows of flash_attention on the whole arrays.
    ``cfg``: ``q_blocksize`` and ``kv_blocksize`` of ``fwd_params`` and of ``bwd_params``.
    Differentiable in reverse mode in query, key, value, bias and softmax_aux, through o and lse.
    """

    call = calls.RingAttention
    reads = (
        arguments.FLASH
        | arguments.DROPOUT
        | {
            "bias",
            "axis_name",
            "layout",
            "q_segment_ids",
            "kv_segment_ids",
            "causal",
            "causal_offset",
            "sliding_window",
            "precision",
            "logits_dtype",
        }
    )

    def operands(self, a: Mapping[str, Any], problem: Any) -> Arrays:
        """The arrays of the call, all constraints as ``parts``."""
        ring, arrays = _ring(problem), self.call.array_arguments(a)
        # a MaskInfo without arrays checks the rule's values
        window = a["sliding_window"]
        rule = MaskInfo(
            causal=a["causal"], causal_offset=a["causal_offset"], sliding_window=window
        ).rule
        names = ("mask_info", "q_segment_ids", "kv_segment_ids")
        mask_info, *segments = (arrays.pop(n, None) for n in names)
        parts = masks.parts_of(mask_info, rule, *segments)
        masks.check_keys(parts, ring.size * problem.key.shape[1])
        return vary_alike({**arrays, "parts": parts}, varying_axes(ring.device_index()))

    def rows(self, work: Work, arrays: Arrays) -> tuple[Any, Any, float]:
        inputs = _Step(work.problem, work.tiles.fwd, arrays)
        q, k, v = (arrays[name] for name in ("query", "key", "value"))
        bias = arrays.get("bias")
        spec, ring = inputs.spec, inputs.ring
        unit = spec.unit(bias)

        def forward_step(t: Any, state: Any, first: bool, last: bool) -> Any:
            so_far, visitors = state
            coming = visitors if last else ring.shift(visitors, 1)
            k, v, visiting = visitors
            operands = inputs(t, visiting, bias)
            del operands["source"]
            return sm.merge(so_far, blockwise.forward(spec, q, k, v, **operands), unit), coming

        acc = accumulation_dtype(q, k, v, at_least=spec.logits_dtype)
        axes = varying_axes(q)
        o = vary(jnp.zeros((*q.shape[:3], v.shape[-1]), acc), axes)
        zero = vary(jnp.zeros(q.shape[:3], acc), axes)
        state = ((o, sm.Rows(zero - jnp.inf, zero)), inputs.visitors)
        (o, rows), _ = run_steps(inputs.schedule.count, forward_step, state)
        return o, rows, unit

    def gradients(self, work: Work, arrays: Arrays, **rows: Any) -> Mapping[str, Any]:
        inputs = _Step(work.problem, work.tiles.bwd, arrays)
        q, bias, ring, schedule = arrays["query"], arrays.get("bias"), inputs.ring, inputs.schedule

        def backward_step(t: Any, state: Any, first: bool, last: bool) -> Any:
            dq, dbias, accumulators, visitors = state
            coming = visitors if last else ring.shift(visitors, 1)
            dk, dv = accumulators if first else ring.shift(accumulators, 1)
            k, v, visiting = visitors
            operands = inputs(t, visiting, bias)
            source = operands.pop("source")
            part = blockwise.backward(inputs.spec, q, k, v, **rows, **operands)
            if dbias is not None and part.dbias is not None:  # every step owns other columns
                start = source * k.shape[1]
                dbias = jax.lax.dynamic_update_slice_in_dim(dbias, part.dbias, start, 3)
            return dq + part.dq, dbias, (dk + part.dk, dv + part.dv), coming

        axes, names = varying_axes(q), ("query", "bias", "key", "value")
        dq, dbias, *accumulators = (
            vary(jnp.zeros(arrays[name].shape, rows["delta"].dtype), axes)
            if name in arrays
            else None
            for name in names
        )
        state = (dq, dbias, tuple(accumulators), inputs.visitors)
        dq, dbias, accumulators, _ = run_steps(
            schedule.count, backward_step, state, first_differs=True
        )
        dk, dv = ring.shift(accumulators, -(schedule.start + schedule.count - 1))
        by_name = {"query": dq, "key": dk, "value": dv, "bias": dbias}
        return {name: x for name, x in by_name.items() if name in arrays}


class _Step:
    """One step's inputs to the blockwise passes: mask, bias columns and dropout of the visitors."""

    def __init__(self, problem: Any, blocks: Blocks, arrays: Arrays):
        q, k = problem.query, problem.key
        self.shape = (*q.shape[:3:2], q.shape[1], k.shape[1])
        self.ring = _ring(problem)
        self.spec = Spec.from_problem(problem, _fitted(blocks, problem, self.ring))
        self.layout = self.spec.layout(q, k)
        self.parts, self.seed = arrays["parts"], arrays.get("dropout_seed")
        self.schedule = Schedule.shortest(self.ring, masks.index_rules(self.parts), *self.shape[2:])
        keys = (arrays["key"], arrays["value"], masks.travelling(self.parts))
        self.visitors = self.ring.shift(keys, self.schedule.start)

    def __call__(self, step: Any, visiting: tuple, bias: jax.Array | None) -> dict[str, Any]:
        """Keyword arguments, and the device that owns the keys."""
        batch, heads, q_len, kv_len = self.shape
        source = self.schedule.source(self.ring, step)
        blocks = {"block_q": self.layout.block_q, "block_kv": self.layout.block_kv}
        mask = masks.visible(
            self.ring, self.parts, visiting, source, q_len=q_len, kv_len=kv_len, **blocks
        )
        dropout = None
        if self.spec.dropout_prob > 0.0:
            dropout = Dropout.make(
                self.seed,
                batch,
                heads,
                q_len,
                kv_len,
                q_index=self.ring.index(self.ring.device_index(), q_len),
                kv_index=self.ring.index(source, kv_len),
            )
        if bias is not None:
            bias = masks.columns(bias, source, kv_len)
        return {"bias": bias, "mask": mask, "dropout": dropout, "source": source}


def _ring(problem: Any) -> Ring:
    """The mesh axis of a call, which has to be bound here."""
    name = problem.axis_name
    try:
        return Ring(name, jax.lax.axis_size(name), problem.layout == "zigzag")
    except NameError:
        raise ValueError(
            f"axis_name: {name!r} is not bound here; call inside shard_map over that axis"
        ) from None


def _fitted(blocks: Blocks, problem: Any, ring: Ring) -> Blocks:
    """Blocks that do not straddle the two chunks of a zigzag shard."""
    parts = 2 if ring.zigzag and ring.size > 1 else 1

    def fit(block: int, length: int) -> int:
        chunk = max(length // parts, 1)
        return cdiv(chunk, cdiv(chunk, block))

    return Blocks(fit(blocks.q, problem.query.shape[1]), fit(blocks.kv, problem.key.shape[1]))


ring_attention = RingAttention()
