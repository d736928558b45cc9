"""Forward pass of a ring whose steps send the keys on while they use them (``send_keys``).

Every step is one kernel over whole shards, the same on all devices; what a device sees of the
visiting keys is decided by their positions in the sequence, which the block table and the element
masks compare. The last step sends nothing. Parts are merged and finished as in
``types.attention.context.passes``, whose backward pass follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types.attention.context.masks import is_by_index
from ejkernel.types.attention.context.piece_calls import Pass, piece_arguments
from ejkernel.types.attention.context.pieces import Chunks, Piece
from ejkernel.types.attention.context.ring import Ring, StepRange, run_steps
from ejkernel.types.attention.rows import RowScales, finalize_rows, merge
from ejkernel.types.masks.fields import with_private
from ejkernel.types.masks.mask_info import MaskInfo

STRATEGY = "ring_remote_copy"


def with_positions(ring: Ring, terms: Sequence[MaskInfo], q_len: int) -> tuple[MaskInfo, ...]:
    """Returns masks whose rules by index compare positions in the whole sequence.

    Positions of the visiting keys follow from the device that they come from.
    """
    q_positions = ring.index(ring.device_index(), q_len)[None]
    return tuple(
        with_private(term, q_positions=q_positions) if is_by_index(term) else term for term in terms
    )


def forward_sending(work: Work, arrays: Arrays) -> tuple[tuple[jax.Array, jax.Array], RowScales]:
    """Returns o ``[b, q, h, dv]``, lse ``[b, q, h]`` and the row values that gradients need."""
    ring, flash = work.problem.ring, work.kernel.flash
    terms = with_positions(ring, arrays["mask_terms"], arrays["query"].shape[1])
    arrays = arrays | {"mask_terms": terms}
    p = Pass(work.kernel, work.problem, arrays, work)
    schedule, all_chunks = p.plan.schedule, Chunks(0, ring.chunks)
    *keys, key_masks = p.local_keys

    def make_call(key_masks: Any, source: Any) -> tuple[Work, Arrays]:
        """Returns the call of a step over the keys of device ``source``.

        Its keys and values are this device's: the kernel reads the visiting ones in their place.
        """
        piece = Piece(all_chunks, all_chunks, None)
        arguments = piece_arguments(p, piece, *keys, key_masks, source)
        problem = flash.problem(arguments)
        call = replace(
            work, kernel=flash, problem=problem, tiles=work.tiles.full_shards, fallback=None
        )
        operands = flash.operands(arguments, problem)
        return call, {name: x for name, x in operands.items() if x is not None}

    unit = flash.row_unit(work.problem.calls[0][1])

    def compute_step(t: Any, state: Any, span: StepRange) -> Any:
        merged, visitors, key_masks = state
        is_last = span.hops_after is None
        next_masks = key_masks if is_last else ring.shift(key_masks, 1)
        call, operands = make_call(key_masks, p.source(t))
        axis_name = None if is_last else ring.axis_name
        (o, rows), visitors = flash.partial_result_of_visitors(call, operands, visitors, axis_name)
        part = o.astype(rows.m.dtype), rows
        return part if merged is None else merge(merged, part, unit), visitors, next_masks

    visitors = flash.visitors(*make_call(key_masks, ring.device_index()))
    visitors, key_masks = ring.shift((visitors, key_masks), schedule.start)
    # two steps a turn exchange the two buffers of keys; one would have to copy them
    ranges = StepRange.split(range(schedule.count))
    (o, rows), *_ = run_steps(ranges, compute_step, (None, visitors, key_masks), unroll=2)
    o, lse, scales = finalize_rows(o, rows, arrays.get("softmax_aux"), unit)
    return (o.astype(arrays["query"].dtype), lse), scales
