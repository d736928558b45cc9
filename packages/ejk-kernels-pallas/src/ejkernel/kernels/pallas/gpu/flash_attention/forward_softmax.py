"""The softmax of a forward step: logits to probabilities and row state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.common.units import sign
from ejkernel.kernels.pallas.gpu.common.lane_softmax import lane_sums, raise_maxima
from ejkernel.kernels.pallas.gpu.common.masks import (
    hide_other_segments,
    hide_outside,
    hide_unset,
    row_of,
)
from ejkernel.kernels.pallas.gpu.common.registers import ROW
from ejkernel.kernels.pallas.gpu.common.rows import multiply_add
from ejkernel.kernels.pallas.gpu.common.schedule import Tile
from ejkernel.kernels.pallas.gpu.flash_attention.forward_form import Form
from ejkernel.types.attention.problem import LOG2E
from ejkernel.types.masks.structure import Band

ROWS = 64  # query rows of one warpgroup
F32 = jnp.float32
EXPONENT = 0x7F800000
Hide = Callable[[jax.Array, float], jax.Array]
FACTORS = ("log2_unit", "large_logit", "large_unit", "slack", "negative", "unit", "value")
CAPPED_FACTORS = ("slope", "unit", "value")
OF_OUTPUT = ("unit", "value")  # the last factors, which only the epilogue reads


def factor_names(form: Form) -> tuple[str, ...]:
    """Returns what the kernel reads of the scales of a head: the columns of ``factors``."""
    return FACTORS if form.problem.soft_cap is None else CAPPED_FACTORS


def factors(form: Form, scale: jax.Array, v_scale: jax.Array) -> jax.Array:
    """Returns the factors of every head, float32 ``[b, h, columns]``, as ``factor_names`` has them.

    They are what ``Form`` has as constants without scales: log2_unit, large_logit and large_unit of
    these names, the slack of ``ForwardTiles`` in dot products, and the sign of the scale. slope:
    factor of dot products inside of the tanh of a cap; unit: natural logit of a dot product of 1,
    or the cap; value: factor of the output. scale ``[b, h]``: of logits; v_scale ``[b, h]``.
    """
    cap = form.problem.soft_cap
    if cap is not None:
        return jnp.stack([scale / cap, jnp.full_like(scale, cap), v_scale], axis=-1)
    unit = jnp.maximum(jnp.abs(scale), 2.0**-120)
    c = unit * LOG2E
    bits = lax.bitcast_convert_type(unit, jnp.int32)
    columns = {
        "log2_unit": c,
        "large_logit": jnp.minimum(2.0**30 / c, jnp.finfo(F32).max),
        "large_unit": lax.bitcast_convert_type(bits & EXPONENT, F32),
        "slack": form.tiles.slack / c,
        "negative": jnp.where(scale < 0.0, 1.0, 0.0),
        "unit": unit,
        "value": v_scale,
    }
    return jnp.stack([columns[name] for name in FACTORS], axis=-1)


def only_ids(ids: jax.Array, block: int, other: int) -> jax.Array:
    """The id of every block ``[b, blocks]`` of ids; ``other`` where they differ."""
    ids = ids.reshape(ids.shape[0], -1, block)
    first = ids[..., 0]
    return jnp.where(jnp.all(ids == first[..., None], axis=-1), first, other)


def has_one_id(form: Form) -> bool:
    """Returns whether steps compare ids of full blocks; lists already separate such blocks."""
    return "q_ids" in form.operands and not form.listed


def block_scalars(form: Form, r: Any, tile: Tile, j: Any) -> tuple:
    """Reads the scalars that the softmax of key block j takes, before the matmul that it waits for.

    With scales: their factors but ``OF_OUTPUT``. With segments, which no call has together with
    scales: the only id of this warpgroup's rows and the only id of the keys, -1 and -2 where ids
    differ. Else nothing.
    """
    if form.scaled:
        count = len(factor_names(form)) - len(OF_OUTPUT)
        return tuple(r.factors[tile.batch, tile.head, n] for n in range(count))
    if not has_one_id(form):
        return ()
    b = row_of(r.q_one_id, tile.batch)
    q_group = tile.block * form.tiles.consumers + lax.axis_index("wg")
    return r.q_one_id[*b, q_group], r.kv_one_id[*b, j]


def _hide(
    kernel: Any, r: Any, x: jax.Array, tile: Tile, j: Any, scalars: tuple, fill: float,
    is_partial: bool,
) -> jax.Array:  # fmt: skip
    """Returns ``x`` with ``fill`` where this warpgroup's rows do not see keys of block j.

    ``is_partial``: the block is known to need a mask; else that is tested.
    """
    form, scheduler = kernel.form, kernel.scheduler
    if form.listed:
        hide_listed = lambda x: _hide_listed(kernel, r, x, tile, j, fill)  # noqa: E731
        return lax.cond(tile.masked(j), hide_listed, lambda x: x, x)
    p, t, band = form.problem, form.tiles, form.rules.band
    wg_row = lax.axis_index("wg") * ROWS
    first_row, position = scheduler.first_row(tile) + wg_row, scheduler.position(tile) + wg_row
    first_key = j * t.block_kv
    end = p.kv_len - first_key if p.kv_len % t.block_kv else None

    def hide(x, band, end):
        if end is None and band.empty:
            return x
        return hide_outside(x, band, first_key - position, columns_left=end, fill=fill)

    def hide_if(test, hide_pairs):
        if is_partial:
            return hide_pairs(x)
        return lax.cond(test, lambda: hide_pairs(x), lambda: x)

    if form.rules.arrays:

        def hide_by_arrays(x):
            x = hide(x, band, end)
            if "q_ids" not in form.operands:
                return x
            segments = functools.partial(_hide_segments, form, r, tile, first_row, first_key, fill)
            q_id, kv_id = scalars
            return lax.cond(q_id == kv_id, lambda: x, lambda: segments(x))

        return hide_if(tile.masked(j), hide_by_arrays)
    # each edge separately: few blocks meet both
    if band.lo is not None:
        x = hide_if(j < tile.full_start, lambda x: hide(x, Band(lo=band.lo), None))
    if band.hi is not None or end is not None:
        x = hide_if(j >= tile.full_stop, lambda x: hide(x, Band(hi=band.hi), end))
    return x


def _hide_segments(form: Form, r: Any, tile: Tile, first_row, first_key, fill, x) -> jax.Array:
    b = row_of(r.q_ids, tile.batch)
    rows, keys = pl.ds(first_row, ROWS), pl.ds(first_key, form.tiles.block_kv)
    return hide_other_segments(x, r.q_ids.at[*b, rows], r.kv_ids.at[*b, keys], fill)


def _hide_listed(kernel: Any, r: Any, x, tile: Tile, step: Any, fill: float) -> jax.Array:
    """Hides pairs of a listed block that needs a mask; the block past the end is fully hidden."""
    form = kernel.form
    j = kernel.loader.key_block(r, tile, step)
    group = tile.block * form.tiles.consumers + lax.axis_index("wg")
    first_row, first_key = group * ROWS, j * form.tiles.block_kv
    left = form.problem.kv_len - first_key
    x = hide_outside(x, form.rules.band, first_key - first_row, columns_left=left, fill=fill)
    if "bits" in form.operands:
        x = hide_unset(x, r.bits[*row_of(r.bits, tile.batch, tile.head), group, j], fill)
    if "q_ids" in form.operands:
        x = _hide_segments(form, r, tile, first_row, first_key, fill, x)
    return x


def softmax(kernel: Any, r: Any, s, tile: Tile, j: Any, scalars: tuple, state: tuple) -> tuple:
    """Runs one step of the online softmax: (p, state, factor of the old accumulators).

    s are dot products of 64 rows with key block j; scalars are its ``block_scalars``.

    Without maxima a step with a mask and one without are branches, and so basic blocks of their
    own. There the compiler lets multiplications and additions fill the time of exponentials. Around
    a branch that only masks, and without any where it runs into what follows, it puts all
    multiplications in front of them, and additions behind.
    """
    form = kernel.form

    def hide(x: jax.Array, fill: float, is_partial: bool = False) -> jax.Array:
        return _hide(kernel, r, x, tile, j, scalars, fill, is_partial)

    def step(hide: Hide, s: jax.Array = s) -> tuple:
        x, new, alpha = softmax_step(form, s, scalars, state, hide)
        return x, tuple(new), alpha

    if not form.unshifted or (not form.masks and not form.tiles.isolates_steps):
        return step(hide)
    if not form.masks:
        # never taken, which the compiler cannot know
        return lax.cond(j < 0, lambda: step(hide_nothing, -s), lambda: step(hide_nothing))
    partial_step = functools.partial(step, functools.partial(hide, is_partial=True))
    from_start = not form.read and form.rules.band.lo is None
    masked = j >= tile.full_stop if from_start else tile.masked(j)
    return lax.cond(masked, partial_step, lambda: step(hide_nothing))


def hide_nothing(x: jax.Array, fill: float) -> jax.Array:
    """Returns ``x``: every row sees every key."""
    return x


def softmax_step(form: Form, s: jax.Array, scalars: tuple, state: tuple, hide: Hide) -> tuple:
    """Returns (p, state, factor of the old accumulators); ``hide(x, fill)`` fills hidden pairs.

    state is (m, total, e). m, the shift of the accumulators, follows a row's maximum no closer
    than ``slack``.

    A probability is exp2 of one multiply-add, s * c - b, with b = m * c as rounded. A multiply-add
    rounds once, at its end, so that p and the accumulators of a row share the factor exp2(e);
    e = m * c - b is the rounding error of b, itself a float32 value; the end divides by it. At
    logits of 2^30 and more e might grow too large. There float32 logits differ by 64 or not at all
    (in base 2), and a power of two for c keeps e at 0 and differences large. float16 lacks the
    range for exp2(e): there m is subtracted first, one more instruction, and state is (m, total).
    """
    p, c = form.problem, form.log2_unit
    if p.soft_cap is not None:
        s = jnp.tanh(s * (scalars[0] if form.scaled else p.scale / p.soft_cap))
    elif not form.scaled and sign(p) < 0.0:
        s = -s
    if form.unshifted:
        x = hide(jnp.exp2(s * c), 0.0)
        return x, (lane_sums(x, state[0], None, keep_here=True),), None
    m, total, *e = state
    slack, large_logit, large_unit = form.tiles.slack / c, form.large_logit, form.large_unit
    if form.scaled and p.soft_cap is None:
        c, large_logit, large_unit, slack, negative = scalars
        s = lax.cond(negative > 0.0, lambda: -s, lambda: s)
    if form.shift is not None:
        x = hide(jnp.exp2(s * c - form.shift), 0.0)
        return x, (m, total + jnp.sum(x, axis=1)), None
    s = hide(s, -jnp.inf)
    if form.tiles.lane_maxima:
        top = raise_maxima(m, s, slack)
    else:
        top = jnp.maximum(m, jnp.max(s, axis=1))
        if form.tiles.slack:
            top = jnp.where(top > m + slack, top, m)
    shift = jnp.where(top == -jnp.inf, 0.0, top) if form.masks else top
    if form.fused:
        unit = jnp.where(jnp.abs(top) >= large_logit, large_unit, c)
        neg_b = -(shift * unit)
        if form.eight_bit:
            neg_b = neg_b + form.p_exponent
        x = jnp.exp2(multiply_add(s, unit, neg_b))
        alpha = jnp.exp2(multiply_add(m, unit, neg_b) - e[0])
        e = [multiply_add(shift, unit, neg_b)]
    else:
        x = jnp.exp2((s - lax.broadcast_in_dim(shift, s.shape, [0])) * c)
        alpha = jnp.exp2((m - shift) * c)
    if form.lane_sums:
        total = lane_sums(x, total, alpha, keep_here=True)
    else:
        total = total * alpha + jnp.sum(x, axis=1)
    return x, (top, total, *e), alpha


def start(form: Form) -> tuple:
    """Returns the state of rows that have seen no key."""
    if form.unshifted:
        return (plgpu.layout_cast(jnp.zeros((ROWS,), F32), ROW),)
    low = -jnp.inf if form.shift is None else form.shift / form.log2_unit
    values = (low, 0.0, 0.0) if form.fused else (low, 0.0)
    return tuple(plgpu.layout_cast(jnp.full((ROWS,), x, F32), ROW) for x in values)
