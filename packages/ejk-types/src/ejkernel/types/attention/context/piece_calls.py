"""The kernel calls of one device: each computes a piece, some queries and some visiting keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.attention.context import masks
from ejkernel.types.attention.context.pieces import Chunks, Piece
from ejkernel.types.mods import SCORE, ModForm, is_float

Arrays = dict[str, Any]
Pieces = tuple[Piece, ...]
KEYS = ("key", "value")
KeyRows = Callable[[slice], Any]
"""Returns rows of the keys and values of a step, and the arrays of masks of all its keys."""


class Pass:
    """One pass over the steps of a ring on one device."""

    def __init__(self, kernel: Any, problem: Any, arrays: Arrays, work: Any = None) -> None:
        self.kernel, self.problem, self.work = kernel, problem, work
        self.ring, self.plan = problem.ring, problem.plan
        self.arrays, self.mask_terms = arrays, arrays["mask_terms"]
        self.query, self.bias = arrays["query"], arrays.get("bias")
        self.lengths = (self.query.shape[1], arrays["key"].shape[1])
        self.device = self.ring.device_index() if self.ring.size > 1 else 0

    @property
    def local_keys(self) -> tuple[Any, ...]:
        """Keys, values ``[b, kv, hk, d]`` and the arrays of masks that belong to keys."""
        return (*(self.arrays[name] for name in KEYS), masks.key_arrays(self.mask_terms))

    def vary(self, x: Any) -> Any:
        """Returns ``x`` as an array that varies over the mesh axes of the queries."""
        return self.kernel.vary_like(x, self.query)

    def slice_chunks(self, chunks: Chunks, axis: int) -> slice:
        """Rows of a shard of queries (``axis`` 0) or keys (1)."""
        length = self.lengths[axis] // self.ring.chunks
        return slice(chunks.first * length, (chunks.first + chunks.count) * length)

    def source(self, step: Any) -> Any:
        """Returns the device whose keys are visiting."""
        return self.plan.schedule.source(self.ring, step) if self.ring.size > 1 else 0

    def switch(
        self,
        step: Any,
        steps: Sequence[int],
        compute: Callable[..., Any],
        *operands: Any,
        is_late: bool = False,
        row: Sequence[Pieces] | None = None,
    ) -> Any:
        """Returns ``compute(pieces, *operands)`` of this device's pieces in a step.

        ``step`` is one of ``steps``, perhaps traced.
        ``row``: the pieces of each device; None: the plan's.
        ``is_late``: what it needs is in memory already when the pass begins. XLA for CPUs would
        make its copies then and keep them; inside a conditional it makes them in time.
        """
        table = [self.plan.pieces[t] for t in steps] if row is None else [row]
        every = tuple(dict.fromkeys(pieces for row in table for pieces in row))
        if len(every) == 1 and not is_late:
            return compute(every[0], *operands)
        if len(every) == 1:
            every = (every[0], ())
            # no device takes the second branch; other compilers see it, and drop the conditional
            chosen = jax.lax.platform_dependent(
                self.device, cpu=lambda x: x // self.ring.size, default=lambda x: x * 0
            )
        else:
            index = [[every.index(pieces) for pieces in row] for row in table]
            chosen = jnp.asarray(index, jnp.int32)[step - steps[0], self.device]
        return jax.lax.switch(chosen, [partial(compute, pieces) for pieces in every], *operands)

    def piece_call(self, piece: Piece, keys: KeyRows, source: Any) -> tuple[Any, Arrays]:
        """Returns the work and the operands of the kernel call of one piece."""
        flash = self.kernel.flash
        arguments = piece_arguments(self, piece, *keys(self.slice_chunks(piece.kv, 1)), source)
        problem, tiles = self.kernel.find_call(self.work, piece)
        work = replace(self.work, kernel=flash, problem=problem, tiles=tiles, fallback=None)
        operands = flash.operands(arguments, problem)
        return work, {name: x for name, x in operands.items() if x is not None}


def piece_arguments(
    p: Pass, piece: Piece, k: Any, v: Any, visiting: Any, source: Any
) -> dict[str, Any]:
    """Returns the canonical arguments of flash attention of one piece, which has k and v."""
    rows, keys = p.slice_chunks(piece.q, 0), p.slice_chunks(piece.kv, 1)
    bias = p.bias
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else bias[:, :, rows]
        bias = masks.slice_columns(bias, source, p.lengths[1], keys)
    mask = masks.piece_mask(
        p.ring, p.mask_terms, visiting, source, piece.shift, lengths=p.lengths, rows=rows, keys=keys
    )
    options = p.problem.options
    first = _first_tokens(p, piece, source)
    sizes = (rows.stop - rows.start, keys.stop - keys.start)
    arguments = {
        "query": p.query[:, rows],
        "key": k,
        "value": v,
        "bias": bias,
        "mask_info": mask,
        "dropout_seed": _piece_seed(p, first) if options["dropout_prob"] else None,
        "return_lse": True,
        **{name: form.mod(p.arrays).on_piece(*first, *sizes) for name, form in p.problem.mods},
    }
    return {**p.kernel.flash.call.boundary.defaults, **options, **arguments}


def _first_tokens(p: Pass, piece: Piece, source: Any) -> tuple[Any, Any]:
    """Returns the indices, in the whole sequence, of the first query and the first key."""
    query = p.ring.starts(p.device, p.lengths[0])[piece.q.first][0]
    return query, p.ring.starts(source, p.lengths[1])[piece.kv.first][0]


def _piece_seed(p: Pass, first: tuple[Any, Any]) -> jax.Array:
    """Returns the seed words, followed by the indices of the first query and the first key."""
    words = jnp.asarray(p.arrays["dropout_seed"]).reshape(-1)
    if words.shape[0] == 1:
        words = jnp.concatenate([words, words * 0, words * 0])
    positions = jnp.stack([jnp.asarray(x, jnp.int32) for x in first])
    return jnp.concatenate([words, positions.astype(words.dtype)])


def captured_floats(mods: Sequence[tuple[str, ModForm]], arrays: Arrays) -> Arrays:
    """Returns the arrays of a score_mod that have gradients, by name."""
    names = [name for argument, form in mods if argument == SCORE for name in form.names]
    return {name: arrays[name] for name in names if is_float(arrays[name])}
