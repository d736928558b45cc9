"""The selected branch, forward, on a TPU.

    x = scale * k q^T over the blocks of a token's list;  o = exp(x - lse) v

Grid (batch, key head, tile). A tile is some tokens with the query heads of a group, 128 rows; it
visits the blocks that one of its tokens selects and masks them for the others. Keys and values of a
head stay in vector memory for all its tiles, so that blocks are picked by loads, not by copies: a
copy of 16 KiB would take longer than its matmuls.

Bound: the matrix units. A list of n keys of a token takes 2 n (d + dv) operations a query head; a
tile does as many times that as its tokens differ, 1 to 8 where a group has 16 heads. Memory: every
key is read once.

Sources: Yuan et al. 2025, Native Sparse Attention (arXiv 2502.11089), section 3.4; Milakov and
Gimelshein 2018 (online softmax).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.compat import result
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.matmul import matmul
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import Problem, Tiles
from ejkernel.kernels.pallas.tpu.native_sparse_attention.steps import (
    FLOOR,
    HIDDEN,
    Part,
    bytes_of,
    compiler_params,
    cost,
    for_steps,
    load_rows,
    raw_scores,
    specs_of,
    store_rows,
    visible,
)


def _kernel(
    p: Problem,
    t: Tiles,
    list_ref: Any,
    rows_ref: Any,
    q_ref: Any,
    k_hbm: Any,
    v_hbm: Any,
    o_ref: Any,
    m_out: Any,
    l_out: Any,
    q_rows: Any,
    k_ref: Any,
    v_ref: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
) -> None:
    b, head, tile = (pl.program_id(axis) for axis in range(3))

    @pl.when(tile == 0)
    def _load_head() -> None:
        pltpu.sync_copy(k_hbm.at[b, head], k_ref)
        pltpu.sync_copy(v_hbm.at[b, head], v_ref)

    load_rows(q_ref, q_rows)
    m_ref[...] = jnp.full(m_ref.shape, FLOOR, jnp.float32)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def scores(part: Part) -> jax.Array:
        return raw_scores(p, part.load(p, k_ref), q_rows[...])

    def add(part: Part, x: jax.Array) -> None:
        x = jnp.where(visible(p, t, part, rows_ref), x, HIDDEN)
        m_old = m_ref[...]
        m = jnp.maximum(m_old, jnp.max(x, axis=0, keepdims=True))
        alpha = jnp.exp2((m_old - m) * p.log2_unit)
        weights = jnp.exp2((x - m) * p.log2_unit)
        v = part.load(p, v_ref)
        m_ref[...] = m
        l_ref[...] = l_ref[...] * alpha + jnp.sum(weights, axis=0, keepdims=True)
        acc_ref[...] = acc_ref[...] * alpha + matmul(v.T, weights.astype(v.dtype), (1, 0))

    for_steps(t, list_ref, scores, add)
    total = l_ref[...]
    o = acc_ref[...] * (1.0 / jnp.where(total != 0.0, total, 1.0))
    store_rows(o_ref, o.T)
    m_out[0, 0, 0], l_out[0, 0, 0] = m_ref[...], total


def selected_forward(
    p: Problem,
    t: Tiles,
    chip: Chip,
    lists: jax.Array,
    rows: jax.Array,
    arrays: tuple[jax.Array, ...],
    dtype: str,
) -> list[jax.Array]:
    """Returns o as ``tile_rows`` in ``dtype``, m and l ``[b, hk, tiles, 1, rows]``.

    m is the largest raw score of a row and l the sum of exponentials relative to it. Lists and rows
    are of ``tile_lists``; ``arrays`` are q, k and v as rows of tiles and whole blocks.
    """
    q, k, v = arrays
    specs, (d, dv) = specs_of(p, t, lists, rows), p.dims
    values = (*lists.shape[:3], 1, specs.rows)
    shapes = [
        result(t.rows_shape(p, q.shape[0], dv), dtype, *arrays),
        result(values, "float32", *arrays),
        result(values, "float32", *arrays),
    ]
    resident = t.resident_bytes(p, backward=False)
    return pl.pallas_call(
        functools.partial(_kernel, p, t),
        grid=lists.shape[:3],
        in_specs=[
            specs.of_lists(),
            specs.of_values(specs.words),
            specs.of_rows(d),
            *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
        ],
        out_specs=[specs.of_rows(dv), specs.of_values(), specs.of_values()],
        out_shape=shapes,
        scratch_shapes=[
            pltpu.VMEM((specs.rows, d), q.dtype),
            pltpu.VMEM(k.shape[2:], k.dtype),
            pltpu.VMEM(v.shape[2:], v.dtype),
            *[pltpu.VMEM((1, specs.rows), jnp.float32)] * 2,
            pltpu.VMEM((dv, specs.rows), jnp.float32),
        ],
        compiler_params=compiler_params(chip, resident),
        cost_estimate=cost(p, t, d + dv, bytes_of(lists, rows, *arrays, *shapes)),
        interpret=chip.interpret,
        name="ejkernel_selected_fwd",
    )(lists, rows, *arrays)
