"""One output of the parts of a sequence.

    m = max_i m_i,  w_i = exp2(c (m_i - m)),  o = sum_i w_i o_i / sum_i w_i l_i

All runs but the last that a sequence is cut into share its rows, and add the parts of a row in
their order. A load takes as long as hundreds of additions, so several parts are loaded before the
first is added: two, or eight of many. Whole sequences are where they belong; those without tokens
get rows of 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.mla_decode.runs import CUT, ROWS
from ejkernel.kernels.pallas.gpu.mla_decode.shares import numbers

F32 = jnp.float32
THREADS = 128  # of a program
PROGRAMS = 6  # of a multiprocessor: as many as its registers hold
FEW, MANY = 2, 8  # parts whose loads are in flight together


def merge(
    whole: jax.Array, o: jax.Array, m: jax.Array, total: jax.Array, cuts: jax.Array,
    lengths: jax.Array, c: float,
) -> jax.Array:  # fmt: skip
    """``whole [b, rows, d]``, in place, with the rows of all other sequences.

    o ``[parts, rows, d]``; maxima m and sums ``[parts, rows]``; cuts ``[runs, CUT]`` and lengths
    ``[b]`` as ``Steps`` has them.
    """
    b, rows, d = whole.shape
    runs, programs = len(cuts), PROGRAMS * rows // ROWS
    layout = plgpu.Layout.WG_STRIDED((d,), d // THREADS)

    def of_many(start: Any, stride: Any) -> Any:
        """How many rows are ``start`` or so many strides after it."""
        return lax.div(jnp.maximum(rows - start, 0) + stride - 1, stride)

    def body(out: Any, o: Any, m: Any, total: Any, cuts: Any, lengths: Any) -> None:
        run, program = lax.axis_index("run"), lax.axis_index("program")
        sequence, first, count, before = (cuts[run, i] for i in range(CUT))

        def clear(i: Any, carry: Any) -> Any:
            at = jnp.minimum(run + i * runs, b - 1)

            @pl.when(lengths[at] <= 0)
            def none() -> None:
                def row(i: Any, carry: Any) -> Any:
                    nothing = plgpu.layout_cast(jnp.zeros((d,), out.dtype), layout)
                    out[at, program + i * programs, :] = nothing
                    return carry

                lax.fori_loop(0, of_many(program, programs), row, jnp.int32(0))

            return carry

        lax.fori_loop(0, -(-b // runs), clear, jnp.int32(0))

        def add_parts(some: int, row: Any) -> None:
            def parts(i: Any, some: int) -> list[tuple[Any, Any]]:
                """(number, whether there is one) of the i-th so many parts."""
                at = [i * some + n for n in range(some)]
                return [(numbers(first, jnp.minimum(n, count - 1)), n < count) for n in at]

            def steps(some: int) -> Any:
                return lax.div(count + (some - 1), some)

            ahead = some if some == FEW else 4 * some

            def higher(i: Any, top: Any) -> Any:
                for x in [m[part, row] for part, _ in parts(i, ahead)]:
                    top = jnp.maximum(top, x)
                return top

            top = lax.fori_loop(0, steps(ahead), higher, jnp.float32(-jnp.inf))
            top = jnp.where(top == -jnp.inf, 0.0, top)

            def add(i: Any, carry: Any) -> Any:
                norm, acc = carry
                found = [
                    (m[part, row], total[part, row], o[part, row, :], there)
                    for part, there in parts(i, some)
                ]
                for high, share, x, there in found:
                    weight = jnp.where(there, jnp.exp2((high - top) * c), 0.0)
                    norm += weight * share
                    acc += weight * x
                return norm, acc

            acc = plgpu.layout_cast(jnp.zeros((d,), F32), layout)
            norm, acc = lax.fori_loop(0, steps(some), add, (jnp.float32(0.0), acc))
            acc = acc * (1.0 / jnp.where(norm == 0.0, 1.0, norm))
            out[sequence, row, :] = acc.astype(out.dtype)

        def add_rows(some: int) -> None:
            start, stride = before * programs + program, (count - 1) * programs

            def row(i: Any, carry: Any) -> Any:
                add_parts(some, start + i * stride)
                return carry

            lax.fori_loop(0, of_many(start, stride), row, jnp.int32(0))

        pl.when((count > 0) & (count < MANY))(lambda: add_rows(FEW))
        pl.when(count >= MANY)(lambda: add_rows(MANY))

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
    # the kernel itself: it is mapped further out, and no version maps references
    run = pl.run_state(lambda place: kernel.fun(place, o, m, total, cuts, lengths))
    return run(whole)


def merged_lse(m: jax.Array, total: jax.Array, sequences: jax.Array, c: float) -> jax.Array:
    """Natural logarithm of the sum of every row, float32 ``[b, rows]``; -inf of an empty sum."""
    part = jnp.arange(len(m), dtype=jnp.int32)
    first, count = sequences[:, 3, None], sequences[:, 4, None]
    later = (part % 2 == 0) & (part // 2 > first // 2) & (part // 2 < first // 2 + count)
    mine = ((count > 0) & ((part == first) | later))[..., None]
    top = jnp.max(jnp.where(mine, m, -jnp.inf), axis=1)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp2((m - shift[:, None]) * c)
    whole = jnp.sum(jnp.where(mine, weight * total, 0.0), axis=1)
    return jnp.where(whole > 0.0, (shift * c + jnp.log2(whole)) * jnp.log(2.0), -jnp.inf)
