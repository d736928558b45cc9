"""Forward and backward pass of one device: pieces of every step, merged by their rows.

    forward   output and normaliser of the visiting keys are merged into those so far; sinks are
              counted once, at the end.
    backward  dq stays; k and v travel again, and with them the accumulators dk and dv, one step
              behind. A device's own keys come last: the gradients of the others come home during
              that step. Every piece uses the normaliser and delta of the full row, so the gradients
              of the pieces add up.

The next keys are sent before the current ones are used, and the accumulators while a piece is
computed, so that communication overlaps with computation. Devices that compute different pieces in
a step take different branches of one ``switch``; no branch communicates. Memory is linear in the
local lengths: own keys, the visiting and the next, and their accumulators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.attention.context import masks
from ejkernel.types.attention.context.pieces import Chunks, Piece
from ejkernel.types.attention.context.ring import Run, run_steps
from ejkernel.types.attention.rows import (
    Rows,
    RowScales,
    finalize_rows,
    merge,
    sink_gradient,
)
from ejkernel.types.mods import SCORE, ModForm, is_float

Arrays = dict[str, Any]
Pieces = tuple[Piece, ...]
KEYS = ("key", "value")


class Pass:
    """One pass over the steps of a ring on one device."""

    def __init__(self, kernel: Any, problem: Any, arrays: Arrays, work: Any = None) -> None:
        self.kernel, self.problem, self.work = kernel, problem, work
        self.ring, self.plan = problem.ring, problem.plan
        self.arrays, self.parts = arrays, arrays["parts"]
        self.query, self.bias = arrays["query"], arrays.get("bias")
        self.lengths = (self.query.shape[1], arrays["key"].shape[1])
        self.device = self.ring.device_index() if self.ring.size > 1 else 0

    @property
    def local_keys(self) -> tuple[Any, ...]:
        """Keys, values and the arrays of masks that belong to keys."""
        return (*(self.arrays[name] for name in KEYS), masks.travelling(self.parts))

    def vary(self, x: Any) -> Any:
        return self.kernel.vary_like(x, self.query)

    def slice_of(self, chunks: Chunks, axis: int) -> slice:
        """Rows of a shard of queries (``axis`` 0) or keys (1)."""
        length = self.lengths[axis] // self.ring.chunks
        return slice(chunks.first * length, (chunks.first + chunks.count) * length)

    def source(self, step: Any) -> Any:
        """The device whose keys are visiting."""
        return self.plan.schedule.source(self.ring, step) if self.ring.size > 1 else 0

    def switch(
        self,
        step: Any,
        steps: Sequence[int],
        branch: Callable[[Pieces], Any],
        *operands: Any,
        is_late: bool = False,
    ) -> Any:
        """Runs ``branch`` of this device's pieces; ``step`` is one of ``steps``, perhaps traced.

        ``is_late``: what it needs is in memory already when the pass begins. XLA for CPUs would
        make its copies then and keep them; inside a conditional it makes them in time.
        """
        table = [self.plan.pieces[t] for t in steps]
        every = tuple(dict.fromkeys(pieces for row in table for pieces in row))
        if len(every) == 1 and not is_late:
            return branch(every[0])(*operands)
        if len(every) == 1:
            # no device takes the second branch; other compilers see it, and drop the conditional
            zero = jax.lax.platform_dependent(
                self.device, cpu=lambda x: x // self.ring.size, default=lambda x: x * 0
            )
            return jax.lax.switch(zero, [branch(every[0]), branch(())], *operands)
        index = jnp.asarray([[every.index(pieces) for pieces in row] for row in table], jnp.int32)
        chosen = index[step - steps[0], self.device]
        return jax.lax.switch(chosen, [branch(pieces) for pieces in every], *operands)

    def piece_call(self, piece: Piece, visitors: Any, source: Any) -> tuple[Any, Arrays]:
        """Returns the work and the operands of the kernel call of one piece."""
        flash = self.kernel.flash
        arguments = piece_arguments(self, piece, *visitors, source)
        problem, tiles = self.kernel.call_of(self.work, piece)
        work = replace(self.work, kernel=flash, problem=problem, tiles=tiles, fallback=None)
        operands = flash.operands(arguments, problem)
        return work, {name: x for name, x in operands.items() if x is not None}


def piece_arguments(
    p: Pass, piece: Piece, k: Any, v: Any, visiting: Any, source: Any
) -> dict[str, Any]:
    """Returns the canonical arguments of flash attention of one piece."""
    rows, keys = p.slice_of(piece.q, 0), p.slice_of(piece.kv, 1)
    bias = p.bias
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else bias[:, :, rows]
        bias = masks.columns(bias, source, p.lengths[1], keys)
    mask = masks.piece_mask(
        p.ring, p.parts, visiting, source, piece.shift, lengths=p.lengths, rows=rows, keys=keys
    )
    options = p.problem.options
    first = _first_tokens(p, piece, source)
    sizes = (rows.stop - rows.start, keys.stop - keys.start)
    arguments = {
        "query": p.query[:, rows],
        "key": k[:, keys],
        "value": v[:, keys],
        "bias": bias,
        "mask_info": mask,
        "dropout_seed": _seed(p, first) if options["dropout_prob"] else None,
        "return_lse": True,
        **{name: form.mod(p.arrays).on_piece(*first, *sizes) for name, form in p.problem.mods},
    }
    return {**p.kernel.flash.call.boundary.defaults, **options, **arguments}


def _first_tokens(p: Pass, piece: Piece, source: Any) -> tuple[Any, Any]:
    """Returns the indices, in the whole sequence, of the first query and the first key."""
    query = p.ring.starts(p.device, p.lengths[0])[piece.q.first][0]
    return query, p.ring.starts(source, p.lengths[1])[piece.kv.first][0]


def _seed(p: Pass, first: tuple[Any, Any]) -> jax.Array:
    """Seed words with the indices of the first query and the first key."""
    words = jnp.asarray(p.arrays["dropout_seed"]).reshape(-1)
    if words.shape[0] == 1:
        words = jnp.concatenate([words, words * 0, words * 0])
    positions = jnp.stack([jnp.asarray(x, jnp.int32) for x in first])
    return jnp.concatenate([words, positions.astype(words.dtype)])


# ---- forward ------------------------------------------------------------------------------------


def forward(work: Any, arrays: Arrays) -> tuple[tuple[jax.Array, jax.Array], RowScales]:
    """Returns o ``[b, q, h, dv]``, lse ``[b, q, h]`` and the row values that gradients need."""
    p = Pass(work.kernel, work.problem, arrays, work)
    transport = work.kernel.transport(work, p)

    def step(t: Any, state: Any, run: Run) -> Any:
        parts, visitors = state
        coming = transport.following(visitors, run)
        # a loop carries one dtype
        wide = run.before is not None or _is_merged(p, run.steps)

        def branch(pieces: Pieces) -> Callable[..., Any]:
            return partial(_forward_pieces, p, pieces, wide=wide, finish=run.after is None)

        parts = p.switch(t, run.steps, branch, parts, transport.keys(visitors, t), p.source(t))
        return parts, coming

    runs = transport.runs()
    state = (None, transport.start(runs[0].steps[0]))
    (o, lse, scales), _ = run_steps(runs, step, state, convert=_widened)
    return (o, lse), scales


def _is_merged(p: Pass, steps: range, side: str = "q") -> bool:
    """Returns whether a chunk of queries (or keys: ``kv``) is in two pieces of one of the steps."""
    for pieces in (pieces for t in steps for pieces in p.plan.pieces[t]):
        spans = [getattr(piece, side) for piece in pieces]
        chunks = [i for span in spans for i in range(span.first, span.first + span.count)]
        if len(chunks) > len(set(chunks)):
            return True
    return False


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _widened(state: Any) -> Any:
    """Returns a state whose sums are in the accumulation dtype, as a loop carries them."""
    sums, *others = state
    return jax.tree.map(lambda x: x.astype(_wide(x.dtype)), sums), *others


def _forward_pieces(
    p: Pass, pieces: Pieces, so_far: Any, visitors: Any, source: Any, *, wide: bool, finish: bool
) -> Any:
    """Merges pieces into the parts so far, one for each chunk of queries."""
    flash, full = p.kernel.flash, p.problem.calls[0][1]
    unit = flash.row_unit(full)
    parts = [None] * p.ring.chunks if so_far is None else list(so_far)
    length = p.lengths[0] // p.ring.chunks
    for piece in pieces:
        work, operands = p.piece_call(piece, visitors, source)
        o, rows = flash.part(work, operands)
        for i in range(piece.q.count):
            at = slice(i * length, (i + 1) * length)
            new = (o[:, at], Rows(*(x[:, at] for x in rows)))
            before = parts[piece.q.first + i]
            parts[piece.q.first + i] = new if before is None else merge(before, new, unit)
    dtype, acc = flash.part_dtypes(full)
    b, _, h, _ = p.query.shape
    for i, part in enumerate(parts):
        if part is None:
            o = jnp.zeros((b, length, h, p.arrays["value"].shape[3]), dtype)
            zero = jnp.zeros((b, length, h), acc)
            part = p.vary((o, Rows(zero - jnp.inf, zero)))
        o, rows = part
        parts[i] = (o.astype(acc) if wide else o, rows)
    if not finish:
        return tuple(parts)
    o = _joined([o for o, _ in parts])
    rows = Rows(*(_joined(x) for x in zip(*(rows for _, rows in parts), strict=True)))
    o, lse, scales = finalize_rows(o, rows, p.arrays.get("softmax_aux"), unit)
    return o.astype(p.query.dtype), lse, scales


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


# ---- backward -----------------------------------------------------------------------------------


def backward(
    work: Any, arrays: Arrays, outputs: tuple[Any, ...], scales: RowScales, cotangents: Any
) -> Mapping[str, Any]:
    """Returns gradients by the names of the arrays."""
    p = Pass(work.kernel, work.problem, arrays, work)
    (o, _), (do, dlse) = outputs, cotangents
    acc = scales.m.dtype
    dlse = dlse.astype(acc)
    delta = (do.astype(acc) * o.astype(acc)).sum(-1) - dlse
    sinks = arrays.get("softmax_aux")
    gradients = {} if sinks is None else {"softmax_aux": sink_gradient(sinks, scales, delta)}
    if p.problem.mods or not masks.sees_itself(p.parts):
        # a row without keys has weights of 0, and 0 * NaN would reach the keys' gradients
        alive = scales.alive[..., None]
        p.query, do = (jnp.where(alive, x, jnp.zeros((), x.dtype)) for x in (p.query, do))
        dlse, delta = (jnp.where(scales.alive, x, 0.0) for x in (dlse, delta))
    rows = {"scales": scales._replace(sinks=None), "delta": delta, "dlse": dlse, "o": o, "do": do}
    transport = work.kernel.transport(work, p)
    # gradients of arrays that stay, to which every piece adds
    staying = {} if p.bias is None else {"bias": p.bias}
    staying |= captured_floats(p.problem.mods, arrays)
    sums = {name: p.vary(jnp.zeros(x.shape, acc)) for name, x in staying.items()}

    dtypes = [arrays[name].dtype for name in KEYS]

    def step(t: Any, state: Any, run: Run) -> Any:
        (dq, accumulators), sums, visitors = state
        coming, arriving = transport.exchange(visitors, accumulators, run)
        wide = run.before is not None or _is_merged(p, run.steps), _is_merged(p, run.steps, "kv")

        def branch(pieces: Pieces) -> Callable[..., Any]:
            finish = run.after is None
            return partial(_backward_pieces, p, rows, pieces, wide=wide, finish=finish)

        keys, source = transport.keys(visitors, t), p.source(t)
        is_late = run.before is not None and run.after is None
        if is_late:
            # a compiler may not run this step before the others: nothing would hide the transfer
            dq, keys = jax.lax.optimization_barrier((dq, keys))
        dq, sums, new = p.switch(t, run.steps, branch, dq, sums, keys, source, is_late=is_late)
        accumulators = transport.accumulated(arriving, new, t, run, dtypes)
        return (dq, accumulators), sums, coming

    runs = transport.runs(backward=True)
    state = ((None, None), sums, transport.start(runs[0].steps[0]))
    (dq, accumulators), sums, _ = run_steps(runs, step, state, convert=_widened)
    returned = transport.returned(accumulators, runs[-1].steps[-1])
    of_keys = dict(zip(KEYS, returned, strict=True))
    return {**gradients, "query": dq, **of_keys, **sums}


def captured_floats(mods: Sequence[tuple[str, ModForm]], arrays: Arrays) -> Arrays:
    """Returns the arrays of a score_mod that have gradients, by name."""
    names = [name for argument, form in mods if argument == SCORE for name in form.names]
    return {name: arrays[name] for name in names if is_float(arrays[name])}


def _backward_pieces(
    p: Pass,
    rows: Mapping[str, Any],
    pieces: Pieces,
    dq: Any,
    sums: Arrays,
    visitors: Any,
    source: Any,
    *,
    wide: tuple[bool, bool],
    finish: bool,
) -> Any:
    """Adds the gradients of pieces: dq by chunk of queries, ``sums``, the visitors' dk and dv.

    ``sums``: gradients of arrays that stay, by name.
    ``wide``: whether dq, and whether dk and dv, are in the accumulation dtype.
    """
    flash, chunks = p.kernel.flash, range(p.ring.chunks)
    by_query = [None] * p.ring.chunks if dq is None else list(dq)
    by_key: list[list[Any]] = [[None] * p.ring.chunks for _ in KEYS]
    dtype, acc = flash.part_dtypes(p.problem.calls[0][1])
    for piece in pieces:
        work, operands = p.piece_call(piece, visitors, source)
        at = p.slice_of(piece.q, 0)
        local = jax.tree.map(lambda x, at=at: x[:, at], dict(rows))
        new = flash.part_gradients(work, operands, **local)
        _add(by_query, piece.q, new["query"])
        for parts, name in zip(by_key, KEYS, strict=True):
            _add(parts, piece.kv, new[name])
        for name, total in sums.items():
            if name == "bias":
                total = _add_columns(p, total, new[name], piece, source)
            else:
                total = total + new[name].astype(total.dtype)
            sums = {**sums, name: total}

    def filled(x: Any, shape: Sequence[int], wide: bool) -> Any:
        x = p.vary(jnp.zeros(shape, dtype)) if x is None else x
        return x.astype(acc) if wide else x

    widths = [p.lengths[axis] // p.ring.chunks for axis in range(2)]
    like = [x.shape for x in (p.query, *visitors[:2])]
    shapes = [(s[0], widths[i > 0], *s[2:]) for i, s in enumerate(like)]
    dq = tuple(filled(by_query[i], shapes[0], wide[0]) for i in chunks)
    new = [
        _joined([filled(x, shape, wide[1]) for x in parts])
        for parts, shape in zip(by_key, shapes[1:], strict=True)
    ]
    if finish:
        dq = _joined(dq).astype(p.query.dtype)
    return dq, sums, tuple(new)


def _add(parts: list[Any], chunks: Chunks, new: jax.Array) -> None:
    length = new.shape[1] // chunks.count
    for i in range(chunks.count):
        part, at = new[:, i * length : (i + 1) * length], chunks.first + i
        before = parts[at]
        if before is not None:
            dtype = _wide(part.dtype)
            part = before.astype(dtype) + part.astype(dtype)
        parts[at] = part


def _add_columns(p: Pass, dbias: Any, new: jax.Array, piece: Piece, source: Any) -> jax.Array:
    """Adds the bias gradient of a piece to its rows and columns."""
    rows, keys = p.slice_of(piece.q, 0), p.slice_of(piece.kv, 1)
    if dbias.shape[2] == 1:
        new, first = new.sum(2, keepdims=True), 0
    else:
        first = rows.start
    column = source * p.lengths[1] + keys.start
    start = [jnp.asarray(i, jnp.int32) for i in (0, 0, first, column)]  # x64: one dtype
    before = jax.lax.dynamic_slice(dbias, start, new.shape)
    return jax.lax.dynamic_update_slice(dbias, before + new.astype(dbias.dtype), start)
