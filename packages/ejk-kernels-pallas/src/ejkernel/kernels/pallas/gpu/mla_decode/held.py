"""Latent decoding on Hopper with the queries in registers, so that three steps fit in memory.

What is computed and how work is split is that of ``steps``. There the queries, 72 KB, are read from
shared memory by every product of scores, as much again as the cache, and only two steps of the
cache fit beside them: the next scores wait for a load that starts when the last values are added.
Here the warpgroup of the scores holds 448 of the 576 columns of its queries in 112 registers a
thread for as long as a sequence lasts. ptxas keeps 24 registers apart: 512 columns, or fewer
registers for the values, make it serialise the products.

Three warpgroups, none of which only copies: who has read a part of a step last asks for the same
part of a later one. The two of the values load their halves of the columns, three steps ahead;
the one of the scores loads the rotary columns, one step ahead.

``lag``: a step's values are added while the exponentials of the next are computed: they start
behind the next scores. Otherwise both products start together, and nothing fills the tensor cores
during the exponentials.

Cycles of a step, each product at its full rate: scores 1152, values 1024; shared memory at 128
bytes a cycle 2112 (2560 in ``steps``): 64 KB + 8 KB of the cache and 16 KB of queries for the
scores, 64 KB and four times 8 KB of probabilities for the values, 72 + 8 KB written.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas.gpu.common.masks import LAYOUT, ROW, hide_outside, read
from ejkernel.kernels.pallas.gpu.common.rows import scale_rows, store_tile
from ejkernel.kernels.pallas.gpu.common.tma import tiled
from ejkernel.kernels.pallas.gpu.mla_decode.steps import (
    F32,
    HALF,
    HALVES,
    LATENT,
    ROPE,
    ROWS,
    SLACK,
    STEP,
    Steps,
    _rows_of,
)
from ejkernel.types.structure import Band

STAGES = 3  # steps of the values in memory
HELD = ((0, 0, 256), (1, 256, 192))  # half, first column and columns of what is in registers
REST = LATENT - 64  # first column of what is not
ALPHA, SHARE, TOP, TOTAL = range(4)  # rows of the sums
COLUMNS = 128  # of one product of values
SCORES = HALVES  # the warpgroup after those of the values
REGISTERS = {"values": 160, "scores": 184}  # of a thread


@dataclass(frozen=True)
class HeldSteps(Steps):
    """The kernel of one form.

    Attributes:
        lag: whether a step's values wait for the next step's scores.
    """

    lag: bool = True

    # ---- copies -----------------------------------------------------------------------------

    def boxes(self, r: Any, sequence: Any, j: Any) -> list[tuple[int, Any, Any]]:
        """(first token in the step, page, first token in the page) of every copy of a step."""
        found = []
        for at in range(0, STEP, self.copied):
            column = jnp.minimum(lax.div(j * STEP + at, self.page), self.columns - 1)
            page = jnp.clip(r.tables[sequence, column], 0, self.pages - 1)
            first = 0 if self.page <= STEP else lax.rem(j, self.page // STEP) * STEP
            found.append((at, page, first))
        return found

    def load(self, r: Any, boxes: list, columns: Any, there: Any, ready: Any) -> None:
        for at, page, first in boxes:
            source = r.cache.at[page, pl.ds(first, self.copied), columns]
            plgpu.copy_gmem_to_smem(source, there.at[pl.ds(at, self.copied)], ready)

    def load_rope(self, r: Any, sequence: Any, j: Any) -> None:
        columns = pl.ds(LATENT, ROPE)
        self.load(r, self.boxes(r, sequence, j), columns, r.rope, r.rope_ready)

    # ---- scores -----------------------------------------------------------------------------

    def queries(self, r: Any, sequence: Any) -> tuple[Any, ...]:
        """The columns of this program's queries that are held; asks for the others."""
        rows = pl.ds(self.place()[1] * ROWS, ROWS)
        rest = pl.ds(REST, LATENT + ROPE - REST)
        plgpu.copy_gmem_to_smem(r.q.at[sequence, rows, rest], r.q_rest, r.q_ready)
        return tuple(
            read(r.q.at[sequence, rows, pl.ds(first, n)], LAYOUT, optimized=False)
            for _, first, n in HELD
        )

    def clear(self, values: Any, left: Any) -> None:
        """Sets rows behind the last to 0, whatever they were."""
        for i in range(HALVES):
            for c in range(0, HALF, 64):
                part = values.at[i, :, pl.ds(c, 64)]
                x = hide_outside(
                    read(part, LAYOUT).astype(F32), Band(), 0, rows_left=left, fill=0.0
                )
                part[...] = x.astype(self.dtype)

    def score(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["scores"], action="increase")
        block = self.place()[1]
        token = lax.div(block * ROWS, self.rows // self.tokens)
        count = self.start(r)[2]

        def product(s_acc: Any, held: Any, n: Any, new: Any) -> Any:
            slot = lax.rem(n, STAGES)
            plgpu.barrier_wait(r.ready.at[slot])
            for x, (half, _, columns) in zip(held, HELD, strict=True):
                plgpu.wgmma(s_acc, x, r.main.at[slot, half, :, pl.ds(0, columns)].T)
            rest = r.main.at[slot, HALVES - 1, :, pl.ds(HALF - 64, 64)]
            plgpu.wgmma(s_acc, r.q_rest.at[:, pl.ds(0, 64)], rest.T)
            plgpu.barrier_wait(r.rope_ready)
            plgpu.wgmma(s_acc, r.q_rest.at[:, pl.ds(64, ROPE)], r.rope.T)
            if self.lag:  # values of the step before start behind all but the last product
                plgpu.wgmma_wait(1)
                pl.when(jnp.logical_not(new))(lambda: plgpu.barrier_arrive(r.p_ready))
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        def step(carry: Any, n: Any, sequence: Any, j: Any, last: Any) -> Any:
            new, held, m, total = carry
            slot = lax.rem(n, STAGES)
            held = lax.cond(new, lambda: self.queries(r, sequence), lambda: held)
            pl.when(new)(lambda: plgpu.barrier_wait(r.q_ready))
            s = pl.run_scoped(lambda acc: product(acc, held, n, new), plgpu.ACC((ROWS, STEP), F32))
            following = self.following(r, sequence, j)
            pl.when(n + 1 < count)(lambda: self.load_rope(r, *following))
            s = -s if self.negative else s
            left = r.sequences[sequence, 0] - (self.tokens - 1 - token) - j * STEP

            def hide() -> jax.Array:
                return hide_outside(s, Band(), 0, columns_left=left)

            s = lax.cond(left < STEP, hide, lambda: s)
            top = jnp.maximum(m, jnp.max(s, axis=1))
            top = jnp.where(top > m + SLACK / self.c, top, m)
            # a token before the last may see nothing of a part
            shift = top if self.tokens == 1 else jnp.where(top == -jnp.inf, 0.0, top)
            alpha = jnp.exp2((m - shift) * self.c)
            total = total * alpha
            p = jnp.exp2((s - lax.broadcast_in_dim(shift, s.shape, [0])) * self.c)
            total = total + jnp.sum(p, axis=1)
            pl.when(n > 0)(lambda: plgpu.barrier_wait(r.p_free))
            r.p[...] = p.astype(self.dtype)
            r.sums[ALPHA] = alpha

            left = r.sequences[sequence, 0] - j * STEP
            pl.when(left < STEP)(lambda: self.clear(r.main.at[slot], left))

            @pl.when(last)
            def keep() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                r.sums[TOP] = top
                r.sums[TOTAL] = total
                r.sums[SHARE] = 1.0 / jnp.where(total == 0.0, 1.0, total)

            plgpu.commit_smem()
            now = last if self.lag else jnp.bool_(True)
            pl.when(now)(lambda: plgpu.barrier_arrive(r.p_ready))

            @pl.when(last)
            def finish() -> None:
                here = (self.part(r, sequence), pl.ds(block * ROWS, ROWS))
                plgpu.copy_smem_to_gmem(r.sums.at[TOP], r.m.at[here])
                plgpu.copy_smem_to_gmem(r.sums.at[TOTAL], r.total.at[here])

            m = lax.cond(last, lambda: _rows_of(-jnp.inf), lambda: top)
            total = lax.cond(last, lambda: _rows_of(0.0), lambda: total)
            return last, held, m, total

        @pl.when(count > 0)
        def every() -> None:
            self.load_rope(r, *self.start(r)[:2])
            nothing = tuple(
                plgpu.layout_cast(jnp.zeros((ROWS, columns), self.dtype), LAYOUT)
                for _, _, columns in HELD
            )
            state = (_rows_of(-jnp.inf), _rows_of(0.0))
            self.walk(r, step, (jnp.bool_(True), nothing, *state))
            plgpu.wait_smem_to_gmem(0)

    # ---- values -----------------------------------------------------------------------------

    def add(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["values"], action="decrease")
        half = lax.axis_index("wg")
        rows = pl.ds(self.place()[1] * ROWS, ROWS)
        mine = pl.ds(half * HALF, HALF)
        count = self.start(r)[2]

        def load(n: Any, boxes: list) -> None:
            slot = lax.rem(n, STAGES)
            self.load(r, boxes, mine, r.main.at[slot, half], r.ready.at[slot])

        def finish(sequence: Any, *added: Any) -> None:
            whole = self.whole(r, sequence)
            share = read(r.sums.at[SHARE], ROW, optimized=False)
            for i, x in enumerate(added):
                columns = pl.ds(half * HALF + i * COLUMNS, COLUMNS)

                @pl.when(whole)
                def divided(x: Any = x, columns: Any = columns) -> None:
                    store_tile(r.whole.at[sequence, rows, columns], x, share)

                @pl.when(jnp.logical_not(whole))
                def summed(x: Any = x, columns: Any = columns) -> None:
                    store_tile(r.o.at[self.part(r, sequence), rows, columns], x)

            plgpu.commit_smem()  # all warps have read what may be written anew from here on

        def every(*sums: Any) -> None:
            def step(ahead: Any, n: Any, sequence: Any, j: Any, last: Any) -> Any:
                slot = lax.rem(n, STAGES)
                values = r.main.at[slot, half]
                boxes = self.boxes(r, *ahead)  # read before the wait, used after it
                plgpu.barrier_wait(r.ready.at[slot])
                plgpu.barrier_wait(r.p_ready)
                alpha = read(r.sums.at[ALPHA], ROW, optimized=False)
                for acc in sums:
                    acc[...] = scale_rows(acc[...], alpha, clear=True)
                for i, acc in enumerate(sums):
                    columns = pl.ds(i * COLUMNS, COLUMNS)
                    plgpu.wgmma(acc, r.p, values.at[:, columns])
                # one value before and in the branch: two would be in registers together
                added = [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in sums]
                pl.when(n + STAGES < count)(lambda: load(n + STAGES, boxes))
                pl.when(last)(lambda: finish(sequence, *added))
                for acc, x in zip(sums, added, strict=True):
                    acc[...] = x
                plgpu.barrier_arrive(r.p_free)
                return self.following(r, *ahead)

            sequence, j, _ = self.start(r)
            for n in range(STAGES):
                at = jnp.int32(n)
                pl.when(at < count)(lambda at=at, x=(sequence, j): load(at, self.boxes(r, *x)))
                sequence, j = self.following(r, sequence, j)
            self.walk(r, step, (sequence, j))

        pl.run_scoped(every, *[plgpu.ACC((ROWS, COLUMNS), F32)] * (HALF // COLUMNS))

    # ---- launch -----------------------------------------------------------------------------

    def _scratch(self) -> dict[str, Any]:
        dtype = jnp.dtype(self.dtype)
        boxes = STEP // self.copied

        return {
            "main": tiled((STAGES, HALVES, STEP, HALF), dtype),
            "rope": tiled((STEP, ROPE), dtype),
            "q_rest": tiled((ROWS, LATENT + ROPE - REST), dtype),
            "p": tiled((ROWS, STEP), dtype),
            "sums": plgpu.SMEM((TOTAL + 1, ROWS), F32),  # an array takes 1 KB at least
            "q_ready": plgpu.Barrier(),
            "ready": plgpu.Barrier(num_arrivals=HALVES * boxes, num_barriers=STAGES),
            "rope_ready": plgpu.Barrier(num_arrivals=boxes),
            "p_ready": plgpu.Barrier(),
            "p_free": plgpu.Barrier(num_arrivals=HALVES),
        }

    warpgroups = HALVES + 1

    def work(self, r: SimpleNamespace) -> None:
        wg = lax.axis_index("wg")
        pl.when(wg == SCORES)(lambda: self.score(r))
        pl.when(wg < HALVES)(lambda: self.add(r))
