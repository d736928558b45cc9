"""Forward and backward pass of one device: pieces of every step, merged by their rows.

    forward   output and normaliser of the visiting keys are merged into those so far; sinks are
              counted once, at the end.
    backward  dq stays; k and v travel again, and with them the accumulators dk and dv, one step
              behind. A device's own keys come last: the gradients of the others come home during
              that step. Where the plan divides it, its first chunk of keys comes first, while the
              first visitors arrive. Every piece uses the normaliser and delta of the full row, so
              the gradients of the pieces add up.

The next keys are sent before the current ones are used, and the accumulators while a piece is
computed, so that communication overlaps with computation. Devices that compute different pieces in
a step take different branches of one ``switch``; no branch communicates. Memory is linear in the
local lengths: own keys, the visiting and the next, and their accumulators.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.attention.context import masks
from ejkernel.types.attention.context.piece_calls import (
    KEYS,
    Arrays,
    KeyRows,
    Pass,
    Pieces,
    captured_floats,
)
from ejkernel.types.attention.context.pieces import Chunks, Piece
from ejkernel.types.attention.context.ring import StepRange, run_steps
from ejkernel.types.attention.context.transport import RingTransport
from ejkernel.types.attention.rows import (
    Rows,
    RowScales,
    finalize_rows,
    merge,
    sink_gradient,
)
from ejkernel.types.masks.hidden import clear_unless

# ---- forward ------------------------------------------------------------------------------------


def forward(work: Any, arrays: Arrays) -> tuple[tuple[jax.Array, jax.Array], RowScales]:
    """Returns o ``[b, q, h, dv]``, lse ``[b, q, h]`` and the row values that gradients need."""
    p = Pass(work.kernel, work.problem, arrays, work)
    transport = work.kernel.transport(work, p)

    def compute_step(t: Any, state: Any, span: StepRange) -> Any:
        parts, visitors = state
        if span.hops_before is not None:
            parts, visitors = _order_after(parts, visitors)
        next_visitors = transport.send_on(visitors, span)
        # a loop carries one dtype
        wide = span.hops_before is not None or _is_merged([p.plan.pieces[i] for i in span.steps])
        # slices that are operands of the next conditional would be copies
        is_full = span.hops_before is None and not has_loop and _covers_queries(p, span.steps[0])

        def compute_pieces(pieces: Pieces, merged: Any, stored: Any, source: Any) -> Any:
            keys = partial(transport.keys, stored, t)
            options = {"wide": wide, "is_full": is_full, "finish": span.hops_after is None}
            return _forward_pieces(p, pieces, merged, keys, source, **options)

        operands = (parts, transport.stored(visitors, t), p.source(t))
        return p.switch(t, span.steps, compute_pieces, *operands), next_visitors

    ranges = transport.step_ranges()
    shortest = work.kernel.shortest_loop
    has_loop = any(len(span.steps) >= shortest for span in ranges)
    state = (None, transport.start(ranges[0].steps[0]))
    (o, lse, scales), _ = run_steps(
        ranges, compute_step, state, convert=_convert_accumulators, shortest=shortest
    )
    return (o, lse), scales


def _order_after(computed: Any, visitors: Any) -> Any:
    """Returns both arguments; the visitors wait for the arrays ``computed``.

    They are sent on while the kernel of this step runs. Compilers that do not know how long kernels
    take may send the keys of several steps one after the other, with no kernel running.
    """
    return jax.lax.optimization_barrier((computed, visitors))


def _delay_on_cpus(p: Pass, visitors: Any, computed: Any) -> Any:
    """Returns the visitors, which on CPUs wait for the arrays ``computed``.

    Nothing hides a transfer there, and the next keys need no memory while a kernel runs. XLA for
    CPUs drops barriers, so their bits need a zero that is known when the arrays are.
    """
    if p.ring.size == 1:
        return visitors

    def delay(visitors: Any, computed: Any) -> Any:
        value = _bits(jax.tree.leaves(computed)[0].reshape(-1)[0])
        zero = value * (p.device // p.ring.size).astype(value.dtype)
        wait = lambda x: _bits(x) + zero.astype(_bits(x).dtype)  # noqa: E731
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(wait(x), x.dtype), visitors)

    return jax.lax.platform_dependent(visitors, computed, cpu=delay, default=lambda x, _: x)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of ``x`` as unsigned integers of its width."""
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _covers_queries(p: Pass, step: int) -> bool:
    """Returns whether a step is one piece of all queries on every device."""
    everything = Chunks(0, p.ring.chunks)
    return all([piece.q for piece in pieces] == [everything] for pieces in p.plan.pieces[step])


def _is_merged(table: Sequence[Sequence[Pieces]], side: str = "q") -> bool:
    """Returns whether a chunk of queries (or keys: ``kv``) is in two pieces of a step.

    ``table``: the pieces of every step, by device.
    """
    for pieces in itertools.chain.from_iterable(table):
        spans = [getattr(piece, side) for piece in pieces]
        chunks = [i for span in spans for i in range(span.first, span.first + span.count)]
        if len(chunks) > len(set(chunks)):
            return True
    return False


def _accumulation_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _convert_accumulators(state: Any) -> Any:
    """Returns a state whose accumulators are in the accumulation dtype, as a loop carries them."""
    accumulators, *others = state
    return jax.tree.map(lambda x: x.astype(_accumulation_dtype(x.dtype)), accumulators), *others


def _forward_pieces(
    p: Pass,
    pieces: Pieces,
    merged: Any,
    keys: KeyRows,
    source: Any,
    *,
    wide: bool,
    is_full: bool,
    finish: bool,
) -> Any:
    """Merges pieces into ``merged``, the partial results of earlier steps: o and row values.

    There is one result for each chunk of queries, or one for all.

    ``is_full``: whether this is the first step, and its result is returned undivided.
    """
    flash, full = p.kernel.flash, p.problem.calls[0][1]
    unit = flash.row_unit(full)
    length = p.lengths[0] // p.ring.chunks

    def split_chunks(result: Any, count: int) -> list[Any]:
        ranges = [slice(i * length, (i + 1) * length) for i in range(count)]
        return [jax.tree.map(lambda x, at=at: x[:, at], result) for at in ranges]

    results = [None] * p.ring.chunks if merged is None else list(merged)
    if len(results) < p.ring.chunks:
        results = split_chunks(results[0], p.ring.chunks)
    for piece in pieces:
        work, operands = p.piece_call(piece, keys, source)
        result = flash.partial_result(work, operands)
        if is_full and not finish:
            return (result,)
        for i, new in enumerate(split_chunks(result, piece.q.count)):
            before = results[piece.q.first + i]
            results[piece.q.first + i] = new if before is None else merge(before, new, unit)
    dtype, acc = flash.partial_dtypes(full)
    b, _, h, _ = p.query.shape
    for i, result in enumerate(results):
        if result is None:
            o = jnp.zeros((b, length, h, p.arrays["value"].shape[3]), dtype)
            zero = jnp.zeros((b, length, h), acc)
            result = p.vary((o, Rows(zero - jnp.inf, zero)))
        o, rows = result
        results[i] = (o.astype(acc) if wide else o, rows)
    if not finish:
        return tuple(results)
    o = _concatenate_rows([o for o, _ in results])
    rows = Rows(*(_concatenate_rows(x) for x in zip(*(rows for _, rows in results), strict=True)))
    o, lse, scales = finalize_rows(o, rows, p.arrays.get("softmax_aux"), unit)
    return o.astype(p.query.dtype), lse, scales


def _concatenate_rows(parts: Sequence[jax.Array]) -> jax.Array:
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
    alive = masks.alive_rows(p.problem.mods, p.mask_terms, scales)
    p.query, do, dlse, delta = clear_unless(alive, p.query, do, dlse, delta)
    rows = {"scales": scales._replace(sinks=None), "delta": delta, "dlse": dlse, "o": o, "do": do}
    # arrays that do not travel: every piece adds to their gradients
    local_inputs = {} if p.bias is None else {"bias": p.bias}
    local_inputs |= captured_floats(p.problem.mods, arrays)
    local_gradients = {name: p.vary(jnp.zeros(x.shape, acc)) for name, x in local_inputs.items()}
    steps = _BackwardSteps(p, work.kernel.transport(work, p, backward=True), rows)
    return gradients | steps.run(local_gradients, shortest_loop=work.kernel.shortest_loop)


class _BackwardSteps:
    """The steps of a backward pass.

    Attributes:
        p, transport: the pass, and how its keys travel.
        rows: values of the full rows, by their names as arguments of ``partial_gradients``.
        divided: as in ``Plan``, where the transport allows it.
        first_chunk: dk and dv of the first chunk of the local keys; empty where they are undivided.
    """

    def __init__(self, p: Pass, transport: Any, rows: dict[str, Any]) -> None:
        self.p, self.transport, self.rows = p, transport, rows
        divides = isinstance(transport, RingTransport)
        self.divided: Sequence[Sequence[Pieces]] = p.plan.divided if divides else ()
        self.first_chunk: tuple[Any, ...] = ()

    def run(self, local_gradients: Arrays, *, shortest_loop: int) -> Arrays:
        """Returns the gradients of queries, keys and values, and ``local_gradients`` with sums."""
        transport, dq = self.transport, None
        ranges = transport.step_ranges()
        visitors = transport.start(ranges[0].steps[0], self.rows["delta"] if self.divided else None)
        if self.divided:
            dq, local_gradients, self.first_chunk = self._differentiate_first_chunk(local_gradients)
        state = ((dq, None), local_gradients, visitors)
        (dq, accumulators), local_gradients, _ = run_steps(
            ranges, self._compute_step, state, convert=_convert_accumulators, shortest=shortest_loop
        )
        kv_gradients = transport.collect(accumulators, ranges[-1].steps[-1])
        kv_gradients = dict(zip(KEYS, kv_gradients, strict=True))
        return {"query": dq, **kv_gradients, **local_gradients}

    def _differentiate_first_chunk(self, local_gradients: Arrays) -> tuple[Any, Any, Any]:
        """Returns dq, ``local_gradients``, and dk and dv of the first chunk of the local keys."""
        p, step, row = self.p, self.transport.local_step, self.divided[0]
        options = {"wide": (_is_merged([row]), False), "finish": False, "chunks": Chunks(0, 1)}
        compute = partial(self._compute_pieces, step, options)
        operands = (None, local_gradients, p.local_keys, p.source(step))
        return p.switch(step, range(step, step + 1), compute, *operands, row=row)

    def _compute_pieces(
        self, step: Any, options: Mapping[str, Any], pieces: Pieces, dq: Any,
        local_gradients: Arrays, stored: Any, source: Any,
    ) -> Any:  # fmt: skip
        keys = partial(self.transport.keys, stored, step)
        return _backward_pieces(
            self.p, self.rows, pieces, dq, local_gradients, keys, source, **options
        )

    def _compute_step(self, t: Any, state: Any, span: StepRange) -> Any:
        p, transport, rows = self.p, self.transport, self.rows
        (dq, accumulators), local_gradients, visitors = state
        if dq is not None:
            dq, visitors = _order_after(dq, visitors)
        elif not transport.is_local(t):
            # the first kernel waits for delta too, so the keys are sent on while it runs
            rows["delta"], visitors = _order_after(rows["delta"], visitors)
        visitors, next_visitors, arriving = transport.exchange(visitors, accumulators, span)
        is_second_chunk = bool(self.divided) and transport.is_local(t)
        row, chunks = None, Chunks(0, p.ring.chunks)
        if is_second_chunk:
            row, chunks = self.divided[1], Chunks(1, 1)
        table = [p.plan.pieces[i] for i in span.steps] if row is None else [row]
        wide = dq is not None or _is_merged(table), _is_merged(table, "kv")
        options = {"wide": wide, "finish": span.hops_after is None, "chunks": chunks}
        stored, source = transport.stored(visitors, t), p.source(t)
        is_late = span.hops_before is not None and span.hops_after is None
        if is_late:
            # a compiler may not run this step before the others: nothing would hide the transfer
            dq, stored = jax.lax.optimization_barrier((dq, stored))
        compute = partial(self._compute_pieces, t, options)
        operands = (dq, local_gradients, stored, source)
        dq, local_gradients, new = p.switch(
            t, span.steps, compute, *operands, is_late=is_late, row=row
        )
        if next_visitors is None:
            next_visitors = transport.send_on(_delay_on_cpus(p, visitors, dq), span)
        if is_second_chunk:
            new = [_concatenate_rows(parts) for parts in zip(self.first_chunk, new, strict=True)]
        dtypes = [p.arrays[name].dtype for name in KEYS]
        accumulators = transport.accumulate(arriving, new, t, span, dtypes)
        return (dq, accumulators), local_gradients, next_visitors


def _backward_pieces(
    p: Pass,
    rows: Mapping[str, Any],
    pieces: Pieces,
    dq: Any,
    local_gradients: Arrays,
    keys: KeyRows,
    source: Any,
    *,
    wide: tuple[bool, bool],
    finish: bool,
    chunks: Chunks,
) -> Any:
    """Adds the gradients of pieces; returns dq, ``local_gradients``, and dk and dv of the visitors.

    dq has an array for each chunk of queries, or is one array where ``finish``.

    ``local_gradients``: gradients of the arrays that do not travel, by name.
    ``wide``: whether dq, and whether dk and dv, are in the accumulation dtype.
    ``chunks``: chunks of keys whose dk and dv are returned.
    """
    flash = p.kernel.flash
    by_query = [None] * p.ring.chunks if dq is None else list(dq)
    by_key: list[list[Any]] = [[None] * p.ring.chunks for _ in KEYS]
    dtype, acc = flash.partial_dtypes(p.problem.calls[0][1])
    for piece in pieces:
        work, operands = p.piece_call(piece, keys, source)
        at = p.slice_chunks(piece.q, 0)
        local = jax.tree.map(lambda x, at=at: x[:, at], dict(rows))
        new = flash.partial_gradients(work, operands, **local)
        _add_by_chunk(by_query, piece.q, new["query"])
        for parts, name in zip(by_key, KEYS, strict=True):
            _add_by_chunk(parts, piece.kv, new[name])
        for name, total in local_gradients.items():
            if name == "bias":
                total = _add_columns(p, total, new[name], piece, source)
            else:
                total = total + new[name].astype(total.dtype)
            local_gradients = {**local_gradients, name: total}

    def fill(x: Any, shape: Sequence[int], wide: bool) -> Any:
        x = p.vary(jnp.zeros(shape, dtype)) if x is None else x
        return x.astype(acc) if wide else x

    widths = [p.lengths[axis] // p.ring.chunks for axis in range(2)]
    like = [x.shape for x in (p.query, *(p.arrays[name] for name in KEYS))]
    shapes = [(s[0], widths[i > 0], *s[2:]) for i, s in enumerate(like)]
    dq = tuple(fill(x, shapes[0], wide[0]) for x in by_query)
    returned = slice(chunks.first, chunks.first + chunks.count)
    new = [
        _concatenate_rows([fill(x, shape, wide[1]) for x in parts[returned]])
        for parts, shape in zip(by_key, shapes[1:], strict=True)
    ]
    if finish:
        dq = _concatenate_rows(dq).astype(p.query.dtype)
    return dq, local_gradients, tuple(new)


def _add_by_chunk(totals: list[Any], chunks: Chunks, new: jax.Array) -> None:
    """Adds ``new`` ``[b, tokens, ...]``, the gradient of ``chunks``, to ``totals`` in place."""
    length = new.shape[1] // chunks.count
    for i in range(chunks.count):
        total, chunk = new[:, i * length : (i + 1) * length], chunks.first + i
        before = totals[chunk]
        if before is not None:
            dtype = _accumulation_dtype(total.dtype)
            total = before.astype(dtype) + total.astype(dtype)
        totals[chunk] = total


def _add_columns(p: Pass, dbias: Any, new: jax.Array, piece: Piece, source: Any) -> jax.Array:
    """Returns dbias with the gradient of a piece added to its rows and columns."""
    rows, keys = p.slice_chunks(piece.q, 0), p.slice_chunks(piece.kv, 1)
    if dbias.shape[2] == 1:
        new, first = new.sum(2, keepdims=True), 0
    else:
        first = rows.start
    column = source * p.lengths[1] + keys.start
    start = [jnp.asarray(i, jnp.int32) for i in (0, 0, first, column)]  # x64: one dtype
    before = jax.lax.dynamic_slice(dbias, start, new.shape)
    return jax.lax.dynamic_update_slice(dbias, before + new.astype(dbias.dtype), start)
