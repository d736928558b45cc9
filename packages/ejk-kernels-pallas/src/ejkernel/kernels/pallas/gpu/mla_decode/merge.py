"""One output of the parts of a sequence.

    m = max_i m_i,  w_i = exp2(c (m_i - m)),  o = sum_i w_i o_i / sum_i w_i l_i

All runs but the last that a sequence is cut into share its rows, and add the parts of a row in
their order. A load takes as long as hundreds of additions, so much is loaded before the first is
added: two parts of four rows, or eight of one row where there are many. Whole sequences are where
they belong; those without tokens get rows of 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.mla_decode.runs import ROWS, scale_of, unit
from ejkernel.kernels.pallas.gpu.mla_decode.shares import CUT, numbers

F32 = jnp.float32
THREADS = 128  # of a program
PROGRAMS = 8  # of 64 rows of a run
FEW, MANY = 2, 8  # parts whose loads are in flight together
TOGETHER = 4  # rows, of few parts


def merge(
    whole: jax.Array, o: jax.Array, m: jax.Array, total: jax.Array, cuts: jax.Array,
    lengths: jax.Array, c: float, k_scale: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """``whole [b, rows, d]``, in place, with the rows of all other sequences.

    o ``[parts, rows, d]``; maxima m and sums ``[parts, rows]``; cuts ``[runs, CUT]`` and lengths
    ``[b]`` and k_scale as ``Steps`` has them.
    """
    b, rows, d = whole.shape
    runs, programs = len(cuts), PROGRAMS * rows // ROWS
    layout = plgpu.Layout.WG_STRIDED((d,), d // THREADS)

    def of_many(many: int, start: Any, stride: Any) -> Any:
        """How many of so many are ``start`` or so many strides after it."""
        return lax.div(jnp.maximum(many - start, 0) + stride - 1, stride)

    def body(
        out: Any, o: Any, m: Any, total: Any, cuts: Any, lengths: Any, k_scale: Any = None
    ) -> None:
        run, program = lax.axis_index("run"), lax.axis_index("program")
        sequence, first, count, before = (cuts[run, i] for i in range(CUT))
        scale = scale_of(k_scale, sequence)
        worth = unit(c, scale)

        def add_parts(some: int, rows: list) -> None:
            def chunk(i: Any, carry: Any) -> Any:
                at = [i * some + n for n in range(some)]
                parts = [(numbers(first, jnp.minimum(n, count - 1)), n < count) for n in at]
                # all loads before the first use of any
                found = [
                    [(m[part, row], total[part, row], o[part, row, :]) for part, _ in parts]
                    for row in rows
                ]
                there = [inside for _, inside in parts]
                return [add(*x, there) for x in zip(carry, found, strict=True)]

            def add(state: Any, found: list, inside: list) -> Any:
                before, norm, acc = state
                top = before
                for high, _, _ in found:  # beyond the last it is the last once more
                    top = jnp.maximum(top, high)
                shift = jnp.where(top == -jnp.inf, 0.0, top)
                alpha = jnp.exp2((before - shift) * worth)
                norm, acc = norm * alpha, acc * alpha
                for (high, share, x), there in zip(found, inside, strict=True):
                    weight = jnp.where(there, jnp.exp2((high - shift) * worth), 0.0)
                    norm += weight * share
                    acc += weight * x
                return top, norm, acc

            nothing = plgpu.layout_cast(jnp.zeros((d,), F32), layout)
            carry = [(jnp.float32(-jnp.inf), jnp.float32(0.0), nothing) for _ in rows]
            carry = lax.fori_loop(0, lax.div(count + (some - 1), some), chunk, carry)
            for row, (_, norm, acc) in zip(rows, carry, strict=True):
                acc = acc * ((1.0 if scale is None else scale) / jnp.where(norm == 0.0, 1.0, norm))
                out[sequence, row, :] = acc.astype(out.dtype)

        def add_rows(some: int, together: int) -> None:
            start, stride = before * programs + program, (count - 1) * programs

            def some_rows(i: Any, carry: Any) -> Any:
                row = (start + i * stride) * together
                add_parts(some, [row + n for n in range(together)])
                return carry

            turns = of_many(rows // together, start, stride)
            lax.fori_loop(0, turns, some_rows, jnp.int32(0))

        pl.when((count > 0) & (count < MANY))(lambda: add_rows(FEW, TOGETHER))
        pl.when(count >= MANY)(lambda: add_rows(MANY, 1))

        def clear(i: Any, carry: Any) -> Any:
            at = jnp.minimum(run + i * runs, b - 1)

            @pl.when(lengths[at] <= 0)
            def none() -> None:
                def row(i: Any, carry: Any) -> Any:
                    nothing = plgpu.layout_cast(jnp.zeros((d,), out.dtype), layout)
                    out[at, program + i * programs, :] = nothing
                    return carry

                lax.fori_loop(0, of_many(rows, program, programs), row, jnp.int32(0))

            return carry

        lax.fori_loop(0, -(-b // runs), clear, jnp.int32(0))

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(runs, programs),
        grid_names=("run", "program"),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_decode_merge",
        compiler_params=OWN_BARRIERS,
    )
    given = (o, m, total, cuts, lengths, *(() if k_scale is None else (k_scale,)))
    # the kernel itself: it is mapped further out, and no version maps references
    run = pl.run_state(lambda place: kernel.fun(place, *given))
    return run(whole)


def merged_lse(
    m: jax.Array, total: jax.Array, sequences: jax.Array, c: float,
    k_scale: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Natural logarithm of the sum of every row, float32 ``[b, rows]``; -inf of an empty sum."""
    worth: Any = c if k_scale is None else unit(c, k_scale)[:, None]
    part = jnp.arange(len(m), dtype=jnp.int32)
    first, count = sequences[:, 3, None], sequences[:, 4, None]
    later = (part % 2 == 0) & (part // 2 > first // 2) & (part // 2 < first // 2 + count)
    mine = ((count > 0) & ((part == first) | later))[..., None]
    top = jnp.max(jnp.where(mine, m, -jnp.inf), axis=1)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    each = worth if k_scale is None else worth[..., None]
    weight = jnp.exp2((m - shift[:, None]) * each)
    whole = jnp.sum(jnp.where(mine, weight * total, 0.0), axis=1)
    return jnp.where(whole > 0.0, (shift * worth + jnp.log2(whole)) * jnp.log(2.0), -jnp.inf)
