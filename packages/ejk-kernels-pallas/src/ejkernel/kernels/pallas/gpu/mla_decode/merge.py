"""One output of the parts of a sequence.

    m = max_i m_i,  w_i = exp2(c (m_i - m)),  o = sum_i w_i o_i / sum_i w_i l_i

A program has one row of one sequence and adds its parts in their order. A load takes as long as
hundreds of additions, so of many parts ``TOGETHER`` are loaded before the first is added. Of whole
sequences, every so-many-th program copies the rows of all of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.mla_decode.shares import numbers

F32 = jnp.float32
THREADS = 128  # of a program
TOGETHER = 8  # parts whose loads are in flight together; rows of one copy


def merge(
    whole: jax.Array, o: jax.Array, m: jax.Array, total: jax.Array, sequences: jax.Array, c: float
) -> jax.Array:
    """``[b, rows, d]`` of parts o ``[parts, rows, d]`` with maxima m and sums ``[parts, rows]``.

    Sequences of one part are copied from ``whole [b, rows, d]``, those without have rows of 0.
    """
    _, rows, d = o.shape
    dtype = whole.dtype
    layout = plgpu.Layout.WG_STRIDED((d,), d // THREADS)
    together = TOGETHER if rows % TOGETHER == 0 else 1

    def body(whole: Any, o: Any, m: Any, total: Any, sequences: Any, out: Any) -> None:
        b, row = lax.axis_index("sequence"), lax.axis_index("row")
        first, count = sequences[b, 3], sequences[b, 4]

        @pl.when((count == 1) & (lax.rem(row, together) == 0))
        def copy() -> None:
            there = pl.ds(row, together)
            out[b, there, :] = whole[b, there, :]

        # a clamped load costs as many instructions as one of a part: few parts go one by one
        @pl.when((count != 1) & (count < TOGETHER))
        def add_few() -> None:
            def higher(i: Any, top: Any) -> Any:
                return jnp.maximum(top, m[numbers(first, i), row])

            top = lax.fori_loop(0, count, higher, jnp.float32(-jnp.inf))
            top = jnp.where(top == -jnp.inf, 0.0, top)

            def add(i: Any, carry: Any) -> Any:
                norm, acc = carry
                part = numbers(first, i)
                weight = jnp.exp2((m[part, row] - top) * c)
                return norm + weight * total[part, row], acc + weight * o[part, row, :]

            acc = plgpu.layout_cast(jnp.zeros((d,), F32), layout)
            norm, acc = lax.fori_loop(0, count, add, (jnp.float32(0.0), acc))
            acc = acc * (1.0 / jnp.where(norm == 0.0, 1.0, norm))
            out[b, row, :] = acc.astype(dtype)

        @pl.when(count >= TOGETHER)
        def add_many() -> None:
            def parts(i: Any, some: int) -> list[tuple[Any, Any]]:
                """(number, whether there is one) of the i-th so many parts."""
                at = [i * some + n for n in range(some)]
                return [(numbers(first, jnp.minimum(n, count - 1)), n < count) for n in at]

            def steps(some: int) -> Any:
                return lax.div(count + (some - 1), some)

            def higher(i: Any, top: Any) -> Any:
                for x in [m[part, row] for part, _ in parts(i, 4 * TOGETHER)]:
                    top = jnp.maximum(top, x)
                return top

            top = lax.fori_loop(0, steps(4 * TOGETHER), higher, jnp.float32(-jnp.inf))
            top = jnp.where(top == -jnp.inf, 0.0, top)

            def add(i: Any, carry: Any) -> Any:
                norm, acc = carry
                found = [
                    (m[part, row], total[part, row], o[part, row, :], there)
                    for part, there in parts(i, TOGETHER)
                ]
                for high, share, x, there in found:
                    weight = jnp.where(there, jnp.exp2((high - top) * c), 0.0)
                    norm += weight * share
                    acc += weight * x
                return norm, acc

            acc = plgpu.layout_cast(jnp.zeros((d,), F32), layout)
            norm, acc = lax.fori_loop(0, steps(TOGETHER), add, (jnp.float32(0.0), acc))
            acc = acc * (1.0 / jnp.where(norm == 0.0, 1.0, norm))
            out[b, row, :] = acc.astype(dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(sequences), rows, d), dtype),
        grid=(len(sequences), rows),
        grid_names=("sequence", "row"),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_decode_merge",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    return kernel(whole, o, m, total, sequences)


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
