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
from ejkernel.types.attention.context.passes import Pass, piece_arguments
from ejkernel.types.attention.context.pieces import Chunks, Piece
from ejkernel.types.attention.context.ring import Ring, Run, run_steps
from ejkernel.types.attention.rows import RowScales, finalize_rows, merge
from ejkernel.types.masks.fields import with_private
from ejkernel.types.masks.mask_info import MaskInfo

STRATEGY = "ring_remote_copy"


def with_positions(ring: Ring, parts: Sequence[MaskInfo], q_len: int) -> tuple[MaskInfo, ...]:
    """Returns masks whose rules by index compare positions in the whole sequence.

    Positions of the visiting keys follow from the device that they come from.
    """
    q_positions = ring.index(ring.device_index(), q_len)[None]
    return tuple(
        with_private(part, q_positions=q_positions) if is_by_index(part) else part for part in parts
    )


def forward_sending(work: Work, arrays: Arrays) -> tuple[tuple[jax.Array, jax.Array], RowScales]:
    """Returns o ``[b, q, h, dv]``, lse ``[b, q, h]`` and the row values that gradients need."""
    ring, flash = work.problem.ring, work.kernel.flash
    parts = with_positions(ring, arrays["parts"], arrays["query"].shape[1])
    arrays = arrays | {"parts": parts}
    p = Pass(work.kernel, work.problem, arrays, work)
    schedule, everything = p.plan.schedule, Chunks(0, ring.chunks)
    *keys, of_masks = p.local_keys

    def step_call(of_masks: Any, source: Any) -> tuple[Work, Arrays]:
        """Returns the call of a step; keys and values are replaced by the visiting ones."""
        piece = Piece(everything, everything, None)
        arguments = piece_arguments(p, piece, *keys, of_masks, source)
        problem = flash.problem(arguments)
        call = replace(
            work, kernel=flash, problem=problem, tiles=work.tiles.full_shards, fallback=None
        )
        operands = flash.operands(arguments, problem)
        return call, {name: x for name, x in operands.items() if x is not None}

    unit = flash.row_unit(work.problem.calls[0][1])

    def step(t: Any, state: Any, run: Run) -> Any:
        so_far, visitors, of_masks = state
        last = run.after is None
        coming = of_masks if last else ring.shift(of_masks, 1)
        call, operands = step_call(of_masks, p.source(t))
        axis_name = None if last else ring.axis_name
        (o, rows), visitors = flash.part_of_visitors(call, operands, visitors, axis_name)
        part = o.astype(rows.m.dtype), rows
        return part if so_far is None else merge(so_far, part, unit), visitors, coming

    visitors = flash.visitors(*step_call(of_masks, ring.device_index()))
    visitors, of_masks = ring.shift((visitors, of_masks), schedule.start)
    # two steps a turn exchange the two buffers of keys; one would have to copy them
    runs = Run.split(range(schedule.count))
    (o, rows), *_ = run_steps(runs, step, (None, visitors, of_masks), unroll=2)
    o, lse, scales = finalize_rows(o, rows, arrays.get("softmax_aux"), unit)
    return (o.astype(arrays["query"].dtype), lse), scales
