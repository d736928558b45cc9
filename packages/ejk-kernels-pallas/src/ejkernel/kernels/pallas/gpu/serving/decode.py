"""Decoding inside the long-prefill kernel on Hopper: some programs decode before they take tiles.

Decoding waits for memory, prefill for matmuls: while few programs decode and all others prefill,
both limits are used at once. An item is a sequence of one new token and two kv heads, one for each
warpgroup, whose query heads are rows of a matmul of 64. Each warpgroup has one of the prefill's two
buffers of keys and of values, in halves that are loaded and used alternately. A program that has
done its items takes tiles like the others, so that nothing waits for it.
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
from ejkernel.kernels.pallas.gpu.common.warps import in_warps
from ejkernel.kernels.pallas.gpu.common.work_counter import load_word
from ejkernel.kernels.pallas.gpu.flash_attention.forward_softmax import (
    F32,
    ROWS,
    hide_nothing,
    softmax_step,
    start,
)
from ejkernel.types.masks.structure import Band, Rules
from ejkernel.types.serving.schedule import DecodeRow, columns_of

COLUMNS = columns_of(DecodeRow)
HEADS = 2  # kv heads of an item; each has one buffer of k and of v, and one warpgroup
HALVES = 2  # of a buffer
HIGH = 1e30  # a maximum that no logit reaches: every probability of such a row is 0


@dataclass(frozen=True)
class DecodeTile:
    """An item as the loader and the softmax see it: a tile of one row and ``kv_len`` keys.

    Attributes:
        head: first query head of the item's first kv head.
        sequence: the sequence.
        row, kv_len: as of ``DecodeRow``.
        full_stop, position: as of ``PageTile``; unread, since ``consume`` hides the last keys.
    """

    head: jax.Array
    sequence: jax.Array
    row: jax.Array
    kv_len: jax.Array

    full_stop: ClassVar[int] = 0
    position: ClassVar[int] = 0


def decode_programs(r: Any) -> jax.Array:
    """Returns how many programs decode."""
    return load_word(r.decode_rows, 0, COLUMNS.programs)


def _item_count(kernel: Any, r: Any) -> jax.Array:
    """Returns how many items this program has."""
    programs, program = decode_programs(r), lax.axis_index("program")
    count = r.decode_rows.shape[0] * _head_pairs(kernel) - program + programs - 1
    return jnp.where(program < programs, lax.div(count, jnp.maximum(programs, 1)), 0)


def _head_pairs(kernel: Any) -> int:
    p = kernel.form.problem
    return p.heads // p.group // HEADS


def _for_each_item(kernel: Any, r: Any, count: Any, body: Callable[..., Any], carry: Any) -> Any:
    """Runs ``carry = body(carry, row, first query head, tile)`` for this program's items.

    ``r.program`` is set by ``QueueScheduler.setup``.
    """
    pairs, group, programs = _head_pairs(kernel), kernel.form.problem.group, decode_programs(r)

    def item(i: Any, carry: Any) -> Any:
        number = r.program + i * programs
        sequence, pair = lax.div(number, pairs), lax.rem(number, pairs)
        columns = (COLUMNS.row, COLUMNS.kv_len)
        row, kv_len = (load_word(r.decode_rows, sequence, column) for column in columns)
        head = pair * HEADS * group
        tile = DecodeTile(head, sequence, row, kv_len)
        return lax.cond(kv_len > 0, lambda: body(carry, row, head, tile), lambda: carry)

    return lax.fori_loop(0, count, item, carry)


def _step_keys(kernel: Any) -> int:
    """Returns the keys of a step: half a buffer."""
    return kernel.form.tiles.block_kv // HALVES


def _steps(kernel: Any, tile: Any) -> Any:
    """Returns the steps of an item."""
    return lax.div(tile.kv_len + _step_keys(kernel) - 1, _step_keys(kernel))


def _half(kernel: Any, smem: Any, buffer: Any, half: Any) -> Any:
    """Returns half a buffer of keys or values: the keys of one step."""
    keys = _step_keys(kernel)
    return smem.at[buffer, pl.ds(half * keys, keys)]


@dataclass(frozen=True)
class RowDecoder:
    """The prologue of the long-prefill kernel."""

    def scratch(self, kernel: Any) -> dict[str, Any]:
        """Returns barriers by name: of half h of buffer b at ``b * HALVES + h``."""
        n, copies = HEADS * HALVES, kernel.loader.copies_of(_step_keys(kernel))
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=n)
        empty = plgpu.Barrier(num_barriers=n)
        cleared = plgpu.Barrier(num_arrivals=HEADS)
        full_halves = {"k_half_full": full, "v_half_full": full}
        empty_halves = {"k_half_empty": empty, "v_half_empty": empty}
        return full_halves | empty_halves | {"cleared": cleared}

    def produce(self, kernel: Any, r: Any) -> None:
        """Copies queries, keys and values of this program's items, and waits for free buffers.

        One warp has the queries and the keys, another the values.
        """
        t, group, count = kernel.form.tiles, kernel.form.problem.group, _item_count(kernel, r)

        def copy_steps(tensor: str, tile: Any, n: Any) -> Any:
            """Copies the keys or values of an item; returns the number of the step after it."""
            smem, full, empty = (
                getattr(r, f"{tensor}_{x}") for x in ("smem", "half_full", "half_empty")
            )

            def step(j: Any, n: Any) -> Any:
                source = kernel.loader.source(r, tile, j, _step_keys(kernel))
                half = lax.rem(n, HALVES)
                for buffer in range(HEADS):
                    of_head = replace(tile, head=tile.head + buffer * group)
                    at, target = buffer * HALVES + half, _half(kernel, smem, buffer, half)
                    pl.when(n >= HALVES)(lambda at=at: plgpu.barrier_wait(empty.at[at]))
                    kernel.loader.copy(r, tensor, of_head, source, target, full.at[at])
                return n + 1

            return lax.fori_loop(0, _steps(kernel, tile), step, n)

        def wait_empty(tensor: str, n: Any) -> None:
            empty = getattr(r, f"{tensor}_half_empty")
            for back in range(HALVES):
                half = lax.rem(lax.max(n - 1 - back, 0), HALVES)
                for buffer in range(HEADS):
                    at = buffer * HALVES + half
                    pl.when(n > back)(lambda at=at: plgpu.barrier_wait(empty.at[at]))

        def copy_keys() -> None:
            def item(carry: Any, row: Any, head: Any, tile: Any) -> Any:
                i, n = carry
                slot = lax.rem(i, t.q_stages)
                pl.when(i >= t.q_stages)(lambda: plgpu.barrier_wait(r.q_empty.at[slot]))
                heads = pl.ds(head, HEADS * group)
                target = r.q_smem.at[slot, pl.ds(0, HEADS * group)]
                plgpu.copy_gmem_to_smem(r.q.at[0, row, heads], target, r.q_full.at[slot])
                return i + 1, copy_steps("k", tile, n)

            zero = jnp.int32(0)
            i, n = _for_each_item(kernel, r, count, item, (zero, zero))
            wait_empty("k", n)
            for back in range(t.q_stages):
                slot = lax.rem(lax.max(i - 1 - back, 0), t.q_stages)
                pl.when(i > back)(lambda slot=slot: plgpu.barrier_wait(r.q_empty.at[slot]))

        def copy_values() -> None:
            def item(n: Any, row: Any, head: Any, tile: Any) -> Any:
                return copy_steps("v", tile, n)

            wait_empty("v", _for_each_item(kernel, r, count, item, jnp.int32(0)))

        in_warps(copy_keys, copy_values)

    def consume(self, kernel: Any, r: Any) -> None:
        """Attends to this program's items: this warpgroup to one kv head of each."""
        form, loader, keys = kernel.form, kernel.loader, _step_keys(kernel)
        t, p = form.tiles, form.problem
        wg = lax.axis_index("wg")
        unmasked = replace(form, problem=replace(p, rules=Rules()))
        used = HEADS * p.group

        # matmuls of zeros take the least power: rows of no query are 0 in either buffer of queries,
        # and have no probabilities
        @pl.when(_item_count(kernel, r) > 0)
        def clear() -> None:
            clear_rows(r.q_smem.at[wg], 0, used)
            plgpu.commit_smem()
            plgpu.barrier_arrive(r.cleared)
            plgpu.barrier_wait(r.cleared)

        def begin() -> tuple:
            top, *others = start(unmasked)
            return only_first(top, used, HIGH), *others

        def item(carry: Any, row: Any, head: Any, tile: Any) -> Any:
            i, n = carry
            slot = lax.rem(i, t.q_stages)
            plgpu.barrier_wait(r.q_full.at[slot])
            q = r.q_smem.at[slot, pl.ds(0, ROWS)]

            def attend(o_acc: Any) -> Any:
                def step(j: Any, carry: Any) -> Any:
                    n, *state = carry
                    half = lax.rem(n, HALVES)
                    at = wg * HALVES + half
                    k, v = (_half(kernel, smem, wg, half) for smem in (r.k_smem, r.v_smem))
                    plgpu.barrier_wait(r.k_half_full.at[at])

                    def multiply(s_acc: Any) -> Any:
                        plgpu.wgmma(s_acc, q, k.T)
                        return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

                    s = pl.run_scoped(multiply, plgpu.ACC((ROWS, keys), F32))
                    plgpu.barrier_arrive(r.k_half_empty.at[at])
                    left = tile.kv_len - j * keys

                    def hide() -> jax.Array:
                        return hide_outside(s, Band(), 0, columns_left=left)

                    s = lax.cond(left < keys, hide, lambda: s)
                    x, state, alpha = softmax_step(unmasked, s, (), tuple(state), hide_nothing)
                    plgpu.barrier_wait(r.v_half_full.at[at])
                    loader.clear_from(v, left)
                    o_acc[...] = scale_rows(o_acc[...], alpha)
                    plgpu.wgmma(o_acc, x.astype(p.dtype), v)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(r.v_half_empty.at[at])
                    return n + 1, *state

                carry = (n, *begin())
                next_n, _, total, *_ = lax.fori_loop(0, _steps(kernel, tile), step, carry)
                plgpu.barrier_arrive(r.q_empty.at[slot])
                share = 1.0 / jnp.where(total == 0.0, 1.0, total)
                o = o_acc[...] * lax.broadcast_in_dim(share, (ROWS, p.value_dim), [0])
                first = wg * p.group
                target = (0, row, head, 0)
                store_row_range(r.o, o.astype(p.dtype), target, first, first + p.group, heads=True)
                return next_n

            return i + 1, pl.run_scoped(attend, plgpu.ACC((ROWS, p.value_dim), F32))

        count = _item_count(kernel, r)
        _for_each_item(kernel, r, count, item, (jnp.int32(0), jnp.int32(0)))
