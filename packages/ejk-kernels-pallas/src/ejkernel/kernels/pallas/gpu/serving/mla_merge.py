"""Merge of latent decoding on Hopper: one output from the partial results of a sequence.

    m = max_i m_i,  w_i = l_i exp2(u (m_i - m)),  o = sum_i w_i o_i / sum_i w_i

Outputs of complete sequences are in place already; sequences without tokens get zeros.

``merge``, of several sequences: all units but the last that a sequence is cut into share its rows,
and add the partial results of a row in their order. A load takes as long as hundreds of additions,
so several are in flight before the first addition: two partial results of four rows, or eight of
one row where there are many.

``merge_at_once``, of one sequence and of fixed splits (``types.serving.split.fixed_split``): a
warpgroup has a row of a sequence, and all loads of the row are in flight together. The lanes of a
warp share the weights: 15 instructions for each partial result, where in ``merge`` every thread
computes every weight in 40, and one sequence that fills the chip has nine rounds of a load and its
latency. One H200, 128 rows: 6.05 -> 4.10 us for 8,192 tokens, 7.2 -> 4.4 for 131,072. Two to eight
warpgroups that share the partial results of a row take 4.1 to 7.2 us, and 4.6 to 8.4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ejkernel.kernels.pallas.gpu.common.registers import (
    SCALAR,
    arith,
    asm,
    constant,
    element,
    i32,
    llvm,
    other_lane,
    thread,
    vector,
)
from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.serving.mla_decode import ROWS, scale_of, scaled_unit
from ejkernel.types.serving.split import CutSequence, partial_number

F32 = jnp.float32
LANES = 32
THREADS = 128  # of a warpgroup
PROGRAMS = 8  # for 64 rows of a unit
PROGRAMS_AT_ONCE = 1024  # of all sequences that are merged at once, unless each has ``PROGRAMS``
FEW, MANY = 2, 8  # partial results whose loads are in flight together
ROWS_OF_FEW = 4  # rows whose loads are in flight together, of few partial results


def merge(
    log2_unit: float, o: jax.Array, partial_o: jax.Array, m: jax.Array, total: jax.Array,
    cut_sequences: jax.Array, lengths: jax.Array, k_scale: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Returns ``o [b, rows, d]``, in place, with the rows of all sequences.

    The arrays are ``MLADecodeKernel.outputs``; ``log2_unit``, u above, is the absolute base-2 logit
    of a dot product of 1.
    """
    b, rows, d = o.shape
    units, programs = len(cut_sequences), PROGRAMS * rows // ROWS
    layout = _strided(d)

    def count_from(start: Any, stride: Any, end: int) -> Any:
        """Returns the length of ``range(start, end, stride)``."""
        return lax.div(jnp.maximum(end - start, 0) + stride - 1, stride)

    def body(
        out: Any, partial_o: Any, m: Any, total: Any, cut_sequences: Any, lengths: Any,
        k_scale: Any = None,
    ) -> None:  # fmt: skip
        unit, program = lax.axis_index("unit"), lax.axis_index("program")
        cut = CutSequence(*(cut_sequences[unit, i] for i in range(len(CutSequence._fields))))
        scale = scale_of(k_scale, cut.sequence)
        factor = scaled_unit(log2_unit, scale)

        def add_partials(together: int, rows: list) -> None:
            def add_some(i: Any, carry: Any) -> Any:
                numbers = [i * together + n for n in range(together)]
                partials = [
                    (
                        partial_number(cut.first_partial, jnp.minimum(n, cut.partials - 1)),
                        n < cut.partials,
                    )
                    for n in numbers
                ]
                # all loads before the first use of any
                loaded = [
                    [
                        (m[partial, row], total[partial, row], partial_o[partial, row, :])
                        for partial, _ in partials
                    ]
                    for row in rows
                ]
                exists = [inside for _, inside in partials]
                return [add(*x, exists) for x in zip(carry, loaded, strict=True)]

            def add(state: Any, loaded: list, exists: list) -> Any:
                before, norm, acc = state
                top = before
                for high, _, _ in loaded:  # beyond the last it is the last once more
                    top = jnp.maximum(top, high)
                shift = jnp.where(top == -jnp.inf, 0.0, top)
                alpha = jnp.exp2((before - shift) * factor)
                norm, acc = norm * alpha, acc * alpha
                for (high, share, x), inside in zip(loaded, exists, strict=True):
                    weight = jnp.where(inside, share * jnp.exp2((high - shift) * factor), 0.0)
                    norm += weight
                    acc += weight * x.astype(F32)
                return top, norm, acc

            zeros = plgpu.layout_cast(jnp.zeros((d,), F32), layout)
            carry = [(jnp.float32(-jnp.inf), jnp.float32(0.0), zeros) for _ in rows]
            rounds = lax.div(cut.partials + (together - 1), together)
            carry = lax.fori_loop(0, rounds, add_some, carry)
            for row, (_, norm, acc) in zip(rows, carry, strict=True):
                acc = acc / jnp.where(norm == 0.0, 1.0, norm)
                out[cut.sequence, row, :] = acc.astype(out.dtype)

        def add_rows(together: int, row_count: int) -> None:
            start = cut.units_before * programs + program
            stride = (cut.partials - 1) * programs

            def some_rows(i: Any, carry: Any) -> Any:
                row = (start + i * stride) * row_count
                add_partials(together, [row + n for n in range(row_count)])
                return carry

            rounds = count_from(start, stride, rows // row_count)
            lax.fori_loop(0, rounds, some_rows, jnp.int32(0))

        has_few = (cut.partials > 0) & (cut.partials < MANY)
        pl.when(has_few)(lambda: add_rows(FEW, ROWS_OF_FEW))
        pl.when(cut.partials >= MANY)(lambda: add_rows(MANY, 1))

        def clear(i: Any, carry: Any) -> Any:
            sequence = jnp.minimum(unit + i * units, b - 1)

            @pl.when(lengths[sequence] <= 0)
            def clear_rows() -> None:
                def clear_row(i: Any, carry: Any) -> Any:
                    zeros = plgpu.layout_cast(jnp.zeros((d,), out.dtype), layout)
                    out[sequence, program + i * programs, :] = zeros
                    return carry

                rounds = count_from(program, programs, rows)
                lax.fori_loop(0, rounds, clear_row, jnp.int32(0))

            return carry

        lax.fori_loop(0, -(-b // units), clear, jnp.int32(0))

    inputs = (partial_o, m, total, cut_sequences, lengths, *(() if k_scale is None else (k_scale,)))
    return _write_rows(body, o, inputs, {"unit": units, "program": programs})


def merge_at_once(
    log2_unit: float, o: jax.Array, partial_o: jax.Array, m: jax.Array, total: jax.Array,
    cut_sequences: jax.Array, lengths: jax.Array, k_scale: jax.Array | None = None,
    *, fixed: bool,
) -> jax.Array:  # fmt: skip
    """Returns the same as ``merge``.

    ``fixed``: whether units are fixed splits. Otherwise the batch is a single sequence.
    """
    b, rows, d = o.shape
    programs = min(rows, max(PROGRAMS, PROGRAMS_AT_ONCE // b))
    splits = (len(m) - b) // (b if fixed else 2)

    def body(
        out: Any, partial_o: Any, m: Any, total: Any, cut_sequences: Any, lengths: Any,
        *scales: Any,
    ) -> None:  # fmt: skip
        sequence, program = lax.axis_index("sequence"), lax.axis_index("program")
        cut = CutSequence(*(cut_sequences[sequence, i] for i in range(len(CutSequence._fields))))
        factor = jnp.float32(scaled_unit(log2_unit, scale_of(*scales or (None,), sequence)))

        def store(row: Any, x: jax.Array) -> None:
            out[sequence, row, :] = x.astype(out.dtype)

        def merge_row(row: Any) -> None:
            x = sum_partials(
                partial_o, m, total, row, cut.first_partial, cut.partials, factor,
                stride=1 if fixed else 2, most=splits,
            )  # fmt: skip
            store(row, x)

        def for_each_row(body: Any) -> None:
            def some_row(i: Any, carry: Any) -> Any:
                body(program + i * programs)
                return carry

            if programs == rows:
                body(program)
            else:
                count = lax.div(rows - 1 - program, programs) + 1
                lax.fori_loop(0, count, some_row, jnp.int32(0))

        pl.when(cut.partials > 0)(lambda: for_each_row(merge_row))

        @pl.when(lengths[sequence] <= 0)
        def clear() -> None:
            zeros = plgpu.layout_cast(jnp.zeros((d,), F32), _strided(d))
            for_each_row(lambda row: store(row, zeros))

    inputs = (partial_o, m, total, cut_sequences, lengths, *(() if k_scale is None else (k_scale,)))
    return _write_rows(body, o, inputs, {"sequence": b, "program": programs})


def _write_rows(
    body: Callable[..., None], o: jax.Array, inputs: tuple[jax.Array, ...], grid: dict[str, int]
) -> jax.Array:
    """Returns ``o`` with the rows that ``body(out, *inputs)`` writes, a warpgroup a program."""
    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_decode_merge",
        compiler_params=OWN_BARRIERS,
    )
    # the kernel itself: it is mapped further out, and no version maps references
    run = pl.run_state(lambda out: kernel.fun(out, *inputs))
    return run(o)


def _strided(d: int) -> Any:
    """Returns the layout of a row in the registers of a warpgroup."""
    return plgpu.Layout.WG_STRIDED((d,), d // THREADS)


def sum_partials(
    partial_o: Any, m: Any, total: Any, row: Any, first: Any, count: Any, factor: Any,
    *, stride: int, most: int,
) -> jax.Array:  # fmt: skip
    """Returns the weighted sum of the partial results of a row, float32 ``[d]``.

    All loads are in flight before the first use of any. Each lane computes the weights of every
    32nd partial result, and lanes exchange them: weights by every thread would take most of the
    time.

    Args:
        partial_o: 16-bit ``[partials, rows, d]``.
        m, total: float32 ``[any, rows]``.
        row, first, count: the row, its first partial result, and the number of them.
        factor: the absolute base-2 logit of a dot product of 1.
        stride: from a partial result to the next.
        most: a bound of their number.
    """
    d = partial_o.shape[2]
    kind = plgpu.ShapeDtypeStruct((d,), F32, layout=_strided(d))
    scalars = (row, first, count, factor)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 3 + (SCALAR,) * len(scalars), return_type=kind
    )
    def apply(_: Any, partial_o: Any, m: Any, total: Any, *scalars: Any) -> Any:
        row, first, count, factor = (x.registers.item() for x in scalars)
        f32 = ir.F32Type.get()
        lane = arith.andi(thread(), constant(LANES - 1))
        column = arith.muli(arith.andi(thread(), constant(THREADS - 1)), constant(d // THREADS))
        load = functools.partial(
            _load_partials, row=row, first=first, count=count, stride=stride, most=most
        )
        loaded = load(_LOAD_WORDS, _word_pair(), partial_o, constant(0), column, 1)
        highs, shares = (
            load(_LOAD_FLOAT.format(default), f32, ref, lane, constant(0), LANES)
            for ref, default in ((m, "0fFF800000"), (total, "0f00000000"))  # -inf, 0
        )
        weights = _weights_of_lane(highs, shares, factor)
        sums = [constant(0.0)] * (d // THREADS)
        element_type = ir.MemRefType(partial_o.type).element_type
        for k, words in enumerate(loaded):
            text = f"shfl.sync.idx.b32 $0, $1, {k % LANES}, 0x1f, 0xffffffff;"
            weight = asm(text, "=f,f", f32, weights[k // LANES])
            for word in range(2):
                both = llvm.extractvalue(i32(), words, [word])
                both = llvm.bitcast(ir.VectorType.get((2,), element_type), both)
                for half in range(2):
                    x = arith.extf(f32, element(both, half))
                    at = 2 * word + half
                    sums[at] = llvm.intr_fma(x, weight, sums[at])
        registers = np.empty((1,), dtype=object)
        registers[0] = vector.from_elements(ir.VectorType.get((len(sums),), f32), sums)
        layout = _strided(d).to_mgpu()
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return apply(partial_o, m, total, *scalars)


# relaxed loads keep their order: ptxas would start others behind the first use of weights
_LOAD_WORDS = (
    "$3, $4; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];"
)
_LOAD_FLOAT = "$2, $3; mov.f32 $0, {}; @p ld.relaxed.gpu.global.f32 $0, [$1];"


def _word_pair() -> ir.Type:
    """Returns the type of two registers of 32 bits."""
    return ir.Type.parse("!llvm.struct<(i32, i32)>")


def _load_partials(
    text: str, kind: Any, ref: Any, start: Any, column: Any, step: int,
    *, row: Any, first: Any, count: Any, stride: int, most: int,
) -> list[Any]:  # fmt: skip
    """Returns what ``text`` loads of every ``step``-th partial result of a row from ``start`` on.

    ``start`` is counted from the row's first. Behind the last one it is ``text``'s default.
    ``kind``: float32, or ``_word_pair``; the others are as of ``sum_partials``.
    """
    i64 = ir.IntegerType.get_signless(64)

    def wide(n: int) -> Any:
        return arith.constant(i64, ir.IntegerAttr.get(i64, n))

    ref_type = ir.MemRefType(ref.type)
    itemsize = mgpu.utils.bytewidth(ref_type.element_type)
    (by_partial, by_row, *_), _ = ref_type.get_strides_and_offset()
    number = arith.addi(first, arith.muli(start, constant(stride)))
    at = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    for x, size in ((number, by_partial), (row, by_row), (column, 1)):
        at = arith.addi(at, arith.muli(arith.extui(i64, x), wide(size * itemsize)))
    text = "{ .reg .pred p; setp.lt.s32 p, " + text + " }"
    registers = "=&r,=&r" if kind == _word_pair() else "=&f"
    loaded = []
    for k in range(0, most, step):
        address = arith.addi(at, wide(k * stride * by_partial * itemsize))
        i = arith.addi(start, constant(k))
        loaded.append(asm(text, f"{registers},l,r,r", kind, address, i, count))
    return loaded


def _weights_of_lane(highs: list[Any], shares: list[Any], factor: Any) -> list[Any]:
    """Returns the weights of a lane's partial results: their shares of the sum of the row."""

    def over_lanes(combine: Any, values: list) -> Any:
        x = functools.reduce(combine, values)
        for distance in (16, 8, 4, 2, 1):
            x = combine(x, other_lane(x, distance))
        return x

    def replace(x: Any, value: float, other: float) -> Any:
        """Returns ``other`` where x is ``value``."""
        is_value = arith.cmpf(arith.CmpFPredicate.OEQ, x, constant(value))
        return arith.select(is_value, constant(other), x)

    shift = replace(over_lanes(arith.maxnumf, highs), -math.inf, 0.0)
    weights = []
    for high, share in zip(highs, shares, strict=True):
        logit = arith.mulf(arith.subf(high, shift), factor)
        power = asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", ir.F32Type.get(), logit)
        weights.append(arith.mulf(share, power))
    norm = replace(over_lanes(arith.addf, weights), 0.0, 1.0)
    return [arith.divf(x, norm) for x in weights]


def merge_lse(
    log2_unit: float, m: jax.Array, total: jax.Array, cut_sequences: jax.Array, lengths: jax.Array,
    k_scale: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Returns the log-sum-exp of every row, float32 ``[b, rows]``; -inf of rows without keys.

    The arguments are the same as of ``merge``.
    """
    factor: Any = log2_unit if k_scale is None else scaled_unit(log2_unit, k_scale)[:, None]
    owner = partial_owners(cut_sequences, lengths)
    mine = (owner == jnp.arange(len(lengths))[:, None])[..., None]
    top = jnp.max(jnp.where(mine, m, -jnp.inf), axis=1)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    partial_factor = factor if k_scale is None else factor[..., None]
    weight = jnp.exp2((m - shift[:, None]) * partial_factor)
    row_sum = jnp.sum(jnp.where(mine, weight * total, 0.0), axis=1)
    return _log_sum_exp(shift * factor, row_sum)


def merge_fixed_lse(
    log2_unit: float, m: jax.Array, total: jax.Array, cut_sequences: jax.Array, lengths: jax.Array,
    k_scale: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Returns the same as ``merge_lse`` of fixed splits, which are added in their order."""
    b = len(lengths)
    factor: Any = log2_unit if k_scale is None else scaled_unit(log2_unit, k_scale)[:, None]
    partials = CutSequence(*cut_sequences.T).partials[:, None]
    split = jnp.arange(len(m) // b - 1)
    # a complete sequence is a last split
    is_seen = jnp.concatenate([split < partials, (partials == 0) & (lengths[:, None] > 0)], axis=1)

    def of_sequences(x: jax.Array) -> jax.Array:
        complete = len(m) - b
        splits = x[:complete].reshape(b, -1, x.shape[1])
        return jnp.concatenate([splits, x[complete:, None]], axis=1)

    highs = jnp.where(is_seen[..., None], of_sequences(m), -jnp.inf)
    top = jnp.max(highs, axis=1)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    totals, row_sum = of_sequences(total), jnp.zeros_like(top)
    for i in range(is_seen.shape[1]):  # whatever their number, 0 behind the last
        weight = jnp.exp2((highs[:, i] - shift) * factor)
        row_sum += jnp.where(is_seen[:, i, None], weight * totals[:, i], 0.0)
    return _log_sum_exp(shift * factor, row_sum)


def _log_sum_exp(top: jax.Array, row_sum: jax.Array) -> jax.Array:
    """Returns the natural log of ``row_sum * 2**top``; -inf where the row has no keys."""
    # a sum of NaN has keys
    return jnp.where(row_sum != 0.0, (top + jnp.log2(row_sum)) * jnp.log(2.0), -jnp.inf)


def partial_owners(cut_sequences: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns the sequence of every partial result, int32 ``[2 * units + b]``; -1: of none."""
    cut, unit = CutSequence(*cut_sequences.T), jnp.arange(len(cut_sequences))
    goes_on = cut.partials > 0
    number = partial_number(cut.first_partial, cut.units_before)
    owners = jnp.where(goes_on, cut.sequence, -1)
    # the first sequence of a unit is the one that goes on behind the unit before
    of_first = jnp.where(goes_on & (number == 2 * unit), owners, jnp.roll(owners, 1))
    of_last = jnp.where(number == 2 * unit + 1, owners, -1)
    sequence = jnp.arange(len(lengths))
    is_cut = jnp.any(owners == sequence[:, None], axis=1)
    complete = jnp.where((lengths > 0) & ~is_cut, sequence, -1)
    return jnp.concatenate([jnp.stack([of_first, of_last], axis=1).reshape(-1), complete])
