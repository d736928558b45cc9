"""Sequences of one new token beside those of many: some programs decode before they take tiles.

Decoding waits for memory, prefill for products: while few programs do the one and all others the
other, both run at once. An item is a sequence and two key heads, one for each warpgroup, whose
query heads are rows of a product of 64. Either has one of the prefill's two buffers of keys and of
values, in halves, which are loaded and used in turns. A program that has done its items takes tiles
like the others, so that nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import hide_outside
from ejkernel.kernels.pallas.gpu.common.rows import (
    clear_rows,
    only_first,
    scale_rows,
    store_row_range,
)
from ejkernel.kernels.pallas.gpu.common.tickets import word
from ejkernel.kernels.pallas.gpu.common.warps import in_warps
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import F32, ROWS, softmax, start
from ejkernel.kernels.pallas.gpu.ragged_page_attention.walks import DECODE
from ejkernel.types.masks.structure import Band, Rules

SIDES = 2  # key heads of an item, buffers, warpgroups
HALVES = 2  # of a buffer
HIGH = 1e30  # a maximum that no logit reaches


@dataclass(frozen=True)
class OwnTile:
    """What the walk over pages asks of a tile: its query head, its sequence of ``length`` keys."""

    head: jax.Array
    sequence: jax.Array
    row: jax.Array
    length: jax.Array

    full_stop: ClassVar[int] = 0
    position: ClassVar[int] = 0


def programs(r: Any) -> jax.Array:
    """How many programs decode."""
    return word(r.decoded, 0, DECODE.programs)


def _count(kernel: Any, r: Any) -> jax.Array:
    """Items of this program."""
    some, program = programs(r), lax.axis_index("program")
    most = r.decoded.shape[0] * _pairs(kernel) - program + some - 1
    return jnp.where(program < some, lax.div(most, jnp.maximum(some, 1)), 0)


def _pairs(kernel: Any) -> int:
    return kernel.problem.heads // kernel.problem.group // SIDES


def _items(kernel: Any, r: Any, count: Any, body: Callable[..., Any], carry: Any) -> Any:
    """``body(carry, row, first query head, tile)`` of each of this program's items."""
    pairs, group, some = _pairs(kernel), kernel.problem.group, programs(r)

    def item(i: Any, carry: Any) -> Any:
        number = r.program + i * some
        sequence, pair = lax.div(number, pairs), lax.rem(number, pairs)
        row, length = (word(r.decoded, sequence, column) for column in (DECODE.row, DECODE.kv_len))
        head = pair * SIDES * group
        tile = OwnTile(head, sequence, row, length)
        return lax.cond(length > 0, lambda: body(carry, row, head, tile), lambda: carry)

    return lax.fori_loop(0, count, item, carry)


def _keys(kernel: Any) -> int:
    """Keys of a step."""
    return kernel.tiles.block_kv // HALVES


def _steps(kernel: Any, tile: Any) -> Any:
    return lax.div(tile.length + _keys(kernel) - 1, _keys(kernel))


def _half(kernel: Any, smem: Any, side: Any, half: Any) -> Any:
    return smem.at[side, pl.ds(half * _keys(kernel), _keys(kernel))]


def scratch(kernel: Any) -> dict[str, Any]:
    """Barriers of the halves of both sides' buffers."""
    n, copies = SIDES * HALVES, max(1, _keys(kernel) // kernel.page)
    ready = plgpu.Barrier(num_arrivals=copies, num_barriers=n)
    free = plgpu.Barrier(num_barriers=n)
    cleared = plgpu.Barrier(num_arrivals=SIDES)
    halves = {"ks_ready": ready, "vs_ready": ready, "ks_free": free, "vs_free": free}
    return halves | {"cleared": cleared}


def copy(kernel: Any, r: Any) -> None:
    """Copies queries, keys and values of this program's items; the last buffers are free again.

    One warp has the queries and the keys, another the values.
    """
    t, group, count = kernel.tiles, kernel.problem.group, _count(kernel, r)

    def steps(which: str, tile: Any, n: Any) -> Any:
        """Copies the keys or values of an item; the number of the step after its last."""
        smem, ready, free = (
            getattr(r, name) for name in (f"{which}_smem", f"{which}s_ready", f"{which}s_free")
        )

        def step(j: Any, n: Any) -> Any:
            place, half = kernel.place(r, tile, j, _keys(kernel)), lax.rem(n, HALVES)
            for side in range(SIDES):
                of = replace(tile, head=tile.head + side * group)
                at, to = side * HALVES + half, _half(kernel, smem, side, half)
                pl.when(n >= HALVES)(lambda at=at: plgpu.barrier_wait(free.at[at]))
                kernel.copy(r, which, of, place, to, ready.at[at])
            return n + 1

        return lax.fori_loop(0, _steps(kernel, tile), step, n)

    def emptied(which: str, n: Any) -> None:
        free = getattr(r, f"{which}s_free")
        for back in range(HALVES):
            half = lax.rem(lax.max(n - 1 - back, 0), HALVES)
            for side in range(SIDES):
                at = side * HALVES + half
                pl.when(n > back)(lambda at=at: plgpu.barrier_wait(free.at[at]))

    def keys() -> None:
        def item(carry: Any, row: Any, head: Any, tile: Any) -> Any:
            i, n = carry
            slot = lax.rem(i, t.q_stages)
            pl.when(i >= t.q_stages)(lambda: plgpu.barrier_wait(r.q_free.at[slot]))
            heads = pl.ds(head, SIDES * group)
            to = r.q_smem.at[slot, pl.ds(0, SIDES * group)]
            plgpu.copy_gmem_to_smem(r.q.at[0, row, heads], to, r.q_ready.at[slot])
            return i + 1, steps("k", tile, n)

        zero = jnp.int32(0)
        i, n = _items(kernel, r, count, item, (zero, zero))
        emptied("k", n)
        for back in range(t.q_stages):
            slot = lax.rem(lax.max(i - 1 - back, 0), t.q_stages)
            pl.when(i > back)(lambda slot=slot: plgpu.barrier_wait(r.q_free.at[slot]))

    def values() -> None:
        def item(n: Any, row: Any, head: Any, tile: Any) -> Any:
            return steps("v", tile, n)

        emptied("v", _items(kernel, r, count, item, jnp.int32(0)))

    in_warps(keys, values)


def attend(kernel: Any, r: Any) -> None:
    """Attention of this program's items: of each the key head of this warpgroup."""
    t, p, keys = kernel.tiles, kernel.problem, _keys(kernel)
    wg = lax.axis_index("wg")
    form = replace(kernel, problem=replace(p, rules=Rules()))
    used = SIDES * p.group

    # products of zeros take the least power: rows of no query are 0 in either place of queries, and
    # have no probabilities
    @pl.when(_count(kernel, r) > 0)
    def clear() -> None:
        clear_rows(r.q_smem.at[wg], 0, used)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.cleared)
        plgpu.barrier_wait(r.cleared)

    def begin() -> tuple:
        top, *others = start(form)
        return only_first(top, used, HIGH), *others

    def item(carry: Any, row: Any, head: Any, tile: Any) -> Any:
        i, n = carry
        slot = lax.rem(i, t.q_stages)
        plgpu.barrier_wait(r.q_ready.at[slot])
        q = r.q_smem.at[slot, pl.ds(0, ROWS)]

        def walk(o_acc: Any) -> Any:
            def step(j: Any, carry: Any) -> Any:
                n, *state = carry
                half = lax.rem(n, HALVES)
                at = wg * HALVES + half
                k, v = (_half(kernel, smem, wg, half) for smem in (r.k_smem, r.v_smem))
                plgpu.barrier_wait(r.ks_ready.at[at])

                def product(s_acc: Any) -> Any:
                    plgpu.wgmma(s_acc, q, k.T)
                    return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

                s = pl.run_scoped(product, plgpu.ACC((ROWS, keys), F32))
                plgpu.barrier_arrive(r.ks_free.at[at])
                left = tile.length - j * keys

                def hide() -> jax.Array:
                    return hide_outside(s, Band(), 0, columns_left=left)

                s = lax.cond(left < keys, hide, lambda: s)
                x, state, alpha = softmax(form, r, s, tile, j, (), tuple(state))
                plgpu.barrier_wait(r.vs_ready.at[at])
                kernel.clear(v, left)
                o_acc[...] = scale_rows(o_acc[...], alpha)
                plgpu.wgmma(o_acc, x.astype(p.dtype), v)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(r.vs_free.at[at])
                return n + 1, *state

            carry = (n, *begin())
            n2, _, total, *_ = lax.fori_loop(0, _steps(kernel, tile), step, carry)
            plgpu.barrier_arrive(r.q_free.at[slot])
            share = 1.0 / jnp.where(total == 0.0, 1.0, total)
            o = o_acc[...] * lax.broadcast_in_dim(share, (ROWS, p.value_dim), [0])
            mine = wg * p.group
            place = (0, row, head, 0)
            store_row_range(r.o, o.astype(p.dtype), place, mine, mine + p.group, heads=True)
            return n2

        return i + 1, pl.run_scoped(walk, plgpu.ACC((ROWS, p.value_dim), F32))

    _items(kernel, r, _count(kernel, r), item, (jnp.int32(0), jnp.int32(0)))
