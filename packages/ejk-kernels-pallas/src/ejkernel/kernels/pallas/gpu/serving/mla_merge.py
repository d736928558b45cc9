"""Merge of latent decoding on Hopper: one output from the partial results of a sequence.

Work split: all units but the last that a sequence is cut into share its rows, each of which
``mla_rows`` merges. Outputs of complete sequences are in place already; sequences without tokens
get zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.serving.mla_decode import ROWS, logit_unit, scale_of
from ejkernel.kernels.pallas.gpu.serving.mla_rows import RowMerge, write_zeros
from ejkernel.kernels.pallas.gpu.serving.tiles import MERGE_PARTIALS
from ejkernel.types.serving.split import CutSequence, partial_number

PROGRAMS = 8  # for 64 rows of a unit


def merge(
    c: float, o: jax.Array, partial_o: jax.Array, m: jax.Array, total: jax.Array,
    cut_sequences: jax.Array, lengths: jax.Array, k_scale: jax.Array | None = None,
    *, many: int = MERGE_PARTIALS,
) -> jax.Array:  # fmt: skip
    """Returns ``o [b, rows, d]``, in place, with the rows of all sequences.

    The arrays are ``MLADecodeKernel.outputs``; c is the absolute base-2 logit of a dot product of
    1; ``many`` as of ``RowMerge``.
    """
    b, rows, _ = o.shape
    units, programs = len(cut_sequences), PROGRAMS * rows // ROWS

    def body(
        out: Any, partial_o: Any, m: Any, total: Any, cut_sequences: Any, lengths: Any,
        k_scale: Any = None,
    ) -> None:  # fmt: skip
        unit, program = lax.axis_index("unit"), lax.axis_index("program")
        cut = CutSequence(*(cut_sequences[unit, i] for i in range(len(CutSequence._fields))))
        factor = logit_unit(c, scale_of(k_scale, cut.sequence))

        def groups(row_count: int) -> tuple[Any, Any, int]:
            start = cut.units_before * programs + program
            return start, (cut.partials - 1) * programs, rows // row_count

        RowMerge(out, partial_o, m, total, cut, factor, many).merge(groups)

        def clear(i: Any, carry: Any) -> Any:
            sequence = jnp.minimum(unit + i * units, b - 1)
            is_empty = lengths[sequence] <= 0
            pl.when(is_empty)(lambda: write_zeros(out, sequence, program, programs, rows))
            return carry

        lax.fori_loop(0, -(-b // units), clear, jnp.int32(0))

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(units, programs),
        grid_names=("unit", "program"),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_decode_merge",
        compiler_params=OWN_BARRIERS,
    )
    inputs = (partial_o, m, total, cut_sequences, lengths, *(() if k_scale is None else (k_scale,)))
    # the kernel itself: it is mapped further out, and no version maps references
    run = pl.run_state(lambda out: kernel.fun(out, *inputs))
    return run(o)


def merge_lse(
    c: float, m: jax.Array, total: jax.Array, cut_sequences: jax.Array, lengths: jax.Array,
    k_scale: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Returns the log-sum-exp of every row, float32 ``[b, rows]``; -inf of rows without keys.

    The arguments are the same as of ``merge``.
    """
    factor: Any = c if k_scale is None else logit_unit(c, k_scale)[:, None]
    owner = partial_owners(cut_sequences, lengths)
    mine = (owner == jnp.arange(len(lengths))[:, None])[..., None]
    top = jnp.max(jnp.where(mine, m, -jnp.inf), axis=1)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    partial_factor = factor if k_scale is None else factor[..., None]
    weight = jnp.exp2((m - shift[:, None]) * partial_factor)
    row_sum = jnp.sum(jnp.where(mine, weight * total, 0.0), axis=1)
    return jnp.where(row_sum > 0.0, (shift * factor + jnp.log2(row_sum)) * jnp.log(2.0), -jnp.inf)


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
