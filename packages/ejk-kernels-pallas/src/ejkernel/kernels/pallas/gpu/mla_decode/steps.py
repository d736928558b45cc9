"""Latent decoding on Hopper: 64 query rows against runs of the paged cache, a row read once.

    s_j = q . c_j,  p_j = exp2(c (s_j - m)),  l = sum_j p_j,  o = sum_j p_j c_j[:latent]

Work split: a program has 64 query rows and a run of steps of 64 tokens (``shares``); the programs
of one run follow each other, so that the second reads the cache from L2. Of its three warpgroups
one multiplies rows of the cache by the queries and makes probabilities; two add them up over half
the columns of the values each, 128 registers a thread. So the sums of a step are added while the
scores of the next are computed, and each product is done once.

Queries in shared memory would be read by every product of scores, 72 KB, as much again as the
cache, and leave room for two steps of it: the next scores would wait for a load that starts when
the last values are added. So the warpgroup of the scores holds 448 of the 576 columns of its
queries in 112 registers a thread for as long as a sequence lasts, and there is room for three.
ptxas keeps 24 registers apart: with 512 columns, or fewer registers for the values, it serialises
the products.

No warpgroup only copies: who has read a part of a step last asks for the same part of a later one
by TMA, a box for every page of a step. The two of the values load their halves of the columns,
three steps ahead; the one of the scores loads the rotary columns, one step ahead.

A step's values are added while the exponentials of the next are computed: they start behind the
next scores. If they started with them, nothing would fill the tensor cores during the exponentials.
The probabilities wait in registers until the next scores are asked for, so that these wait neither
for values being added nor for shared memory to be written (0.263 -> 0.245 ms on an H200, 64
sequences of 8192). The warpgroup of the scores decides how fast a step is: it reads page numbers
before the product and lengths once a sequence (0.237), and lanes keep what they can to themselves
(``softmax``, 0.227).

Where a part of a sequence ends, its last probabilities do not wait: values are added and written
while the queries of the next are read, 16 bytes a lane either way (``quads``).

What is summed is scaled anew only where a row's maximum has grown by more than ``SLACK`` powers of
two. Rows of the cache behind the last are set to 0 before they are added, whatever they were.

Bound: 2 * rows * (dim + latent) operations a token; at 128 rows 146 GFLOP for 64 sequences of 8192,
0.21 ms at 690 TFLOP/s, more than the 0.14 ms in which 604 MB are read at 4.3 TB/s. Cycles of a
step, each product at its full rate: scores 1152, values 1024; shared memory at 128 bytes a cycle
2112: 64 KB + 8 KB of the cache and 16 KB of queries for the scores, 64 KB and four times 8 KB of
probabilities for the values, 72 + 8 KB written.

Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1; Shah et al. 2024, FlashAttention-3 (arXiv
2407.08608), section 3.1 (warp specialisation); Dao et al. 2023, "Flash-Decoding for long-context
inference".
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas import compat
from ejkernel.kernels.pallas.gpu.common.masks import hide_outside
from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, ROW, read
from ejkernel.kernels.pallas.gpu.common.rows import clear_rows, scale_rows
from ejkernel.kernels.pallas.gpu.common.tma import tiled
from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.mla_decode.deal import deal
from ejkernel.kernels.pallas.gpu.mla_decode.quads import load_rows, store_rows
from ejkernel.kernels.pallas.gpu.mla_decode.runs import ROWS, STEP, Runs, scale_of, unit
from ejkernel.kernels.pallas.gpu.mla_decode.shares import CUT
from ejkernel.kernels.pallas.gpu.mla_decode.softmax import halved, lane_sums, over_lanes, raised
from ejkernel.types.masks.structure import Band

F32 = jnp.float32
LATENT, ROPE = 512, 64
HALVES = 2  # of the values' columns, one to a warpgroup
HALF = LATENT // HALVES
COLUMNS = 128  # of one product of values
HELD = ((0, 0, 256), (1, 256, 192))  # half, first column and columns of what is in registers
REST = LATENT - 64  # first column of what is not
ALPHA, SHARE = range(2)  # rows of the sums
SLACK = 8.0
SCORES = HALVES  # the warpgroup after those of the values
REGISTERS = {"values": 160, "scores": 184}  # of a thread


def _rows_of(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, F32), ROW)


class Steps(Runs):
    """The kernel of one form."""

    stages = 3  # steps of the values in memory

    # ---- what a cache of another dtype does otherwise (``eight_bit``) --------------------------

    def load_rope(self, r: Any, boxes: list) -> None:
        self.load(r, boxes, pl.ds(LATENT, ROPE), r.rope, r.rope_ready)

    def await_rope(self, r: Any) -> None:
        plgpu.barrier_wait(r.rope_ready)

    def load_half(self, r: Any, boxes: list, n: Any, half: Any) -> None:
        """Asks for half of the columns of step n's values."""
        slot, columns = lax.rem(n, self.stages), pl.ds(half * HALF, HALF)
        self.load(r, boxes, columns, r.main.at[slot, half], r.ready.at[slot])

    def begin(self, r: Any, half: Any, count: Any) -> Any:
        """Asks for the first steps: the first that is not asked for."""
        ahead = self.start(r)
        for n in range(self.stages):

            @pl.when(n < count)
            def there(n: int = n, at: Any = ahead) -> None:
                self.load_half(r, self.boxes(r, at), jnp.int32(n), half)

            ahead = self.following(r, ahead)
        return ahead

    def boxes_ahead(self, r: Any, ahead: Any) -> Any:
        """Read before a step's waits, used after them."""
        return self.boxes(r, ahead)

    def adding(self, r: Any, n: Any, half: Any, count: Any) -> None:
        """Behind the start of step n's products of values, of 128 columns each."""

    def added(self, r: Any, n: Any, boxes: Any, half: Any, count: Any) -> None:
        """Behind step n's product of values, whose memory is free."""
        n = n + self.stages
        pl.when(n < count)(lambda: self.load_half(r, boxes, n, half))

    def ended(self, r: Any, n: Any, ahead: Any, half: Any, count: Any) -> None:
        """Behind all that others wait for in step n; ``ahead``: the next step to ask for."""

    def named(self, scratch: dict[str, Any]) -> dict[str, Any]:
        """Shared memory by the names of what lies there."""
        return scratch

    # ---- scores -----------------------------------------------------------------------------

    def queries(self, r: Any, sequence: Any) -> tuple[Any, ...]:
        """The columns of this program's queries that are held; asks for the others."""
        rows = pl.ds(self.block()[1] * ROWS, ROWS)
        rest = pl.ds(REST, LATENT + ROPE - REST)
        plgpu.copy_gmem_to_smem(r.q.at[sequence, rows, rest], r.q_rest, r.q_ready)
        return tuple(load_rows(r.q.at[sequence, rows, pl.ds(first, n)]) for _, first, n in HELD)

    def clear(self, values: Any, left: Any) -> None:
        """Sets rows behind the last to 0, whatever they were."""
        for i in range(HALVES):
            clear_rows(values.at[i], 0, left)

    def score(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["scores"], action="increase")
        block = self.block()[1]
        token = lax.div(block * ROWS, self.rows // self.tokens)
        count = self.count(r)

        def publish(n: Any, p: Any, alpha: Any, m: Any, total: Any, last: Any) -> None:
            """Writes what is to be added in step n, and how it is divided after the last."""
            pl.when(n > 0)(lambda: plgpu.barrier_wait(r.p_free))
            r.p[...] = p
            r.sums[ALPHA] = alpha

            @pl.when(last)
            def divide() -> None:
                whole = over_lanes(total)
                r.sums[SHARE] = 1.0 / jnp.where(whole == 0.0, 1.0, whole)

            plgpu.commit_smem()

        def product(s_acc: Any, held: Any, n: Any, waits: Any, before: list) -> Any:
            slot = lax.rem(n, self.stages)
            plgpu.barrier_wait(r.ready.at[slot])
            for x, (half, _, columns) in zip(held, HELD, strict=True):
                plgpu.wgmma(s_acc, x, r.main.at[slot, half, :, pl.ds(0, columns)].T)
            rest = r.main.at[slot, HALVES - 1, :, pl.ds(HALF - 64, 64)]
            plgpu.wgmma(s_acc, r.q_rest.at[:, pl.ds(0, 64)], rest.T)
            self.await_rope(r)
            plgpu.wgmma(s_acc, r.q_rest.at[:, pl.ds(64, ROPE)], r.rope.T)
            pl.when(waits)(lambda: publish(n - 1, *before, jnp.bool_(False)))
            plgpu.wgmma_wait(1)  # values of the step before start behind all but the last product
            pl.when(waits)(lambda: plgpu.barrier_arrive(r.p_ready))
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        def step(carry: Any, n: Any, at: Any, last: Any) -> Any:
            new, held, *state = carry
            slot = lax.rem(n, self.stages)
            # read before the product, used after it
            boxes = self.boxes(r, self.following(r, at))
            scale = scale_of(r.k_scale, at.sequence)

            @pl.when(new & (n > 0))
            def ended() -> None:  # a part's last values are added and written meanwhile
                publish(n - 1, *state, jnp.bool_(True))
                plgpu.barrier_arrive(r.p_ready)

            held = lax.cond(new, lambda: self.queries(r, at.sequence), lambda: held)
            pl.when(new)(lambda: plgpu.barrier_wait(r.q_ready))
            s = pl.run_scoped(
                lambda acc: product(acc, held, n, jnp.logical_not(new), state),
                plgpu.ACC((ROWS, STEP), F32),
            )
            _, _, m, total = state
            m = lax.cond(new, lambda: _rows_of(-jnp.inf), lambda: m)
            total = lax.cond(new, lambda: _rows_of(0.0), lambda: total)
            pl.when(n + 1 < count)(lambda: self.load_rope(r, boxes))
            c = unit(self.c, scale)
            s = -s if self.negative else s
            s = s if scale is None else s * jnp.where(scale < 0, -1.0, 1.0)
            left = at.length - (self.tokens - 1 - token) - at.j * STEP

            def hide() -> jax.Array:
                return hide_outside(s, Band(), 0, columns_left=left)

            s = lax.cond(left < STEP, hide, lambda: s)
            top = raised(m, s, SLACK / c)
            # a token before the last may see nothing of a part
            shift = top if self.tokens == 1 else jnp.where(top == -jnp.inf, 0.0, top)
            alpha = jnp.exp2((m - shift) * c)
            p = jnp.exp2((s - lax.broadcast_in_dim(shift, s.shape, [0])) * c)
            total = lane_sums(p, total, alpha)
            p = halved(p, self.dtype)
            left = at.length - at.j * STEP
            pl.when(left < STEP)(lambda: self.clear(r.main.at[slot], left))

            @pl.when(last)
            def finish() -> None:
                here = (self.part(r, at, n), pl.ds(block * ROWS, ROWS))
                compat.store_registers(r.m.at[here], top)
                compat.store_registers(r.total.at[here], over_lanes(total))

            return last, held, p, alpha, top, total

        @pl.when(block == 0)
        def plan() -> None:  # of the merge
            for i, x in enumerate(r.run[3:]):
                r.cuts[self.block()[0], i] = x

        @pl.when(count > 0)
        def every() -> None:
            self.load_rope(r, self.boxes(r, self.start(r)))
            nothing = tuple(
                plgpu.layout_cast(jnp.zeros((ROWS, columns), self.dtype), LAYOUT)
                for _, _, columns in (*HELD, (0, 0, STEP))
            )
            state = (nothing[-1], _rows_of(0.0), _rows_of(-jnp.inf), _rows_of(0.0))
            carry = (jnp.bool_(True), nothing[:-1], *state)
            _, _, *state = self.walk(r, step, carry)
            publish(count - 1, *state, jnp.bool_(True))
            plgpu.barrier_arrive(r.p_ready)

    # ---- values -----------------------------------------------------------------------------

    def add(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["values"], action="decrease")
        half = lax.axis_index("wg")
        rows = pl.ds(self.block()[1] * ROWS, ROWS)
        count = self.count(r)

        def finish(at: Any, n: Any, *added: Any) -> None:
            sequence, whole, part = at.sequence, at.whole(n), self.part(r, at, n)
            share = read(r.sums.at[SHARE], ROW, optimized=False)
            scale = scale_of(r.k_scale, sequence)
            share = share if scale is None else share * scale
            for i, x in enumerate(added):
                columns = pl.ds(half * HALF + i * COLUMNS, COLUMNS)

                @pl.when(whole)
                def divided(x: Any = x, columns: Any = columns) -> None:
                    store_rows(r.whole.at[sequence, rows, columns], x, share)

                @pl.when(jnp.logical_not(whole))
                def summed(x: Any = x, columns: Any = columns) -> None:
                    store_rows(r.o.at[part, rows, columns], x)

            plgpu.commit_smem()  # all warps have read what may be written anew from here on

        def every(*sums: Any) -> None:
            def step(ahead: Any, n: Any, at: Any, last: Any) -> Any:
                slot = lax.rem(n, self.stages)
                values = r.main.at[slot, half]
                boxes = self.boxes_ahead(r, ahead)
                plgpu.barrier_wait(r.ready.at[slot])
                plgpu.barrier_wait(r.p_ready)
                alpha = read(r.sums.at[ALPHA], ROW, optimized=False)
                for acc in sums:
                    acc[...] = scale_rows(acc[...], alpha, clear=True)
                for i, acc in enumerate(sums):
                    columns = pl.ds(i * COLUMNS, COLUMNS)
                    plgpu.wgmma(acc, r.p, values.at[:, columns])
                self.adding(r, n, half, count)
                # one value before and in the branch: two would be in registers together
                added = [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in sums]
                self.added(r, n, boxes, half, count)
                pl.when(last)(lambda: finish(at, n, *added))
                for acc, x in zip(sums, added, strict=True):
                    acc[...] = x
                plgpu.barrier_arrive(r.p_free)
                self.ended(r, n, ahead, half, count)
                return self.following(r, ahead)

            self.walk(r, step, self.begin(r, half, count))

        pl.run_scoped(every, *[plgpu.ACC((ROWS, COLUMNS), F32)] * (HALF // COLUMNS))

    # ---- launch -----------------------------------------------------------------------------

    def _scratch(self) -> dict[str, Any]:
        dtype = jnp.dtype(self.dtype)
        boxes = STEP // self.copied

        return {
            "main": tiled((self.stages, HALVES, STEP, HALF), dtype),
            "rope": tiled((STEP, ROPE), dtype),
            "q_rest": tiled((ROWS, LATENT + ROPE - REST), dtype),
            "p": tiled((ROWS, STEP), dtype),
            "sums": plgpu.SMEM((SHARE + 1, ROWS), F32),  # an array takes 1 KB at least
            "q_ready": plgpu.Barrier(),
            "ready": plgpu.Barrier(num_arrivals=HALVES * boxes, num_barriers=self.stages),
            "rope_ready": plgpu.Barrier(num_arrivals=boxes),
            "p_ready": plgpu.Barrier(),
            "p_free": plgpu.Barrier(num_arrivals=HALVES),
        }

    def __call__(
        self,
        q: jax.Array,
        cache: jax.Array,
        tables: jax.Array,
        lengths: jax.Array,
        k_scale: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Outputs of whole sequences ``[b, rows, 512]``; sums of parts, float32: o ``[parts, rows,
        512]``; m and total ``[parts + b, rows]``; of the sequence that goes on behind a run
        ``[runs, CUT]``: which it is, the number of its first part, how many parts or 0, and how
        many runs before this one it began.

        q ``[b, rows, 576]``, cache ``[pages, page, 576]``, tables ``[b, columns]``, lengths
        ``[b]``, k_scale float32 ``[1 or b]`` of rows of the cache. Parts that no program has are
        whatever the memory held.
        """
        given = {"q": q, "cache": cache, "tables": tables, "lengths": lengths}
        if k_scale is not None:
            given["k_scale"] = k_scale
        names = (*given, "whole", "o", "m", "total", "cuts")

        def body(*refs: Any, **scratch: Any) -> None:
            named = {"k_scale": None} | dict(zip(names, refs, strict=True))
            r = SimpleNamespace(**named, **self.named(scratch))
            r.run = deal(
                r.lengths, self.block()[0], groups=self.groups, step=STEP, capacity=self.capacity
            )
            wg = lax.axis_index("wg")
            pl.when(wg == SCORES)(lambda: self.score(r))
            pl.when(wg < HALVES)(lambda: self.add(r))

        parts = 2 * self.groups
        sums = jax.ShapeDtypeStruct((parts + self.batch, self.rows), F32)
        kernel = plgpu.kernel(
            body,
            out_type=(
                jax.ShapeDtypeStruct((self.batch, self.rows, LATENT), self.dtype),
                jax.ShapeDtypeStruct((parts, self.rows, LATENT), F32),
                sums,
                sums,
                jax.ShapeDtypeStruct((self.groups, CUT), jnp.int32),
            ),
            scratch_types=self._scratch(),
            grid=(self.groups * self.blocks,),
            grid_names=("program",),
            num_threads=HALVES + 1,
            thread_name="wg",
            kernel_name="mla_decode",
            compiler_params=OWN_BARRIERS,
        )
        return kernel(*given.values())
