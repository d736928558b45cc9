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
next scores. If they started with them, nothing would fill the tensor cores during the exponentials
(0.269 against 0.263 ms on an H200, 64 sequences of 8192).

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

from collections.abc import Callable
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
from ejkernel.types.structure import Band

F32 = jnp.float32
ROWS = 64  # query rows of a program
STEP = 64  # tokens of a step
STAGES = 3  # steps of the values in memory
LATENT, ROPE = 512, 64
HALVES = 2  # of the values' columns, one to a warpgroup
HALF = LATENT // HALVES
COLUMNS = 128  # of one product of values
HELD = ((0, 0, 256), (1, 256, 192))  # half, first column and columns of what is in registers
REST = LATENT - 64  # first column of what is not
ALPHA, SHARE, TOP, TOTAL = range(4)  # rows of the sums
SLACK = 8.0
SCORES = HALVES  # the warpgroup after those of the values
REGISTERS = {"values": 160, "scores": 184}  # of a thread


def _rows_of(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, F32), ROW)


@dataclass(frozen=True)
class Steps:
    """The kernel of one form.

    Attributes:
        batch, rows: sequences, and query rows of each, a multiple of 64.
        tokens: new tokens of a sequence; each has ``rows / tokens`` rows, a multiple of 64.
        page, pages, columns: tokens of a page, pages, and columns of the table.
        dtype: of queries and cache.
        c: what a product is worth in powers of two; ``negative``: its sign.
        cores: multiprocessors.
    """

    batch: int
    rows: int
    tokens: int
    page: int
    pages: int
    columns: int
    dtype: str
    c: float
    negative: bool
    cores: int

    @property
    def blocks(self) -> int:
        """Programs of a run."""
        return self.rows // ROWS

    @property
    def groups(self) -> int:
        """Runs."""
        return max(1, self.cores // self.blocks)

    @property
    def copied(self) -> int:
        """Tokens of one copy."""
        return min(self.page, STEP)

    # ---- the walk ---------------------------------------------------------------------------

    def place(self) -> tuple[jax.Array, jax.Array]:
        """(run, block of query rows) of this program."""
        program = lax.axis_index("program")
        return lax.div(program, self.blocks), lax.rem(program, self.blocks)

    def start(self, r: Any) -> tuple[jax.Array, ...]:
        """(sequence, its step, how many steps) of this program's run."""
        run = self.place()[0]
        return tuple(r.runs[run, i] for i in range(3))

    def part(self, r: Any, sequence: Any) -> jax.Array:
        """Number of what this program sums of a sequence."""
        run = self.place()[0]
        inside = 2 * run + (sequence != r.runs[run, 0]).astype(jnp.int32)
        return jnp.where(self.whole(r, sequence), 2 * self.groups + sequence, inside)

    def whole(self, r: Any, sequence: Any) -> jax.Array:
        return r.sequences[sequence, 4] == 1

    def following(self, r: Any, sequence: Any, j: Any) -> tuple[jax.Array, jax.Array]:
        ended = j + 1 == r.sequences[sequence, 1]
        return jnp.where(ended, r.sequences[sequence, 2], sequence), jnp.where(ended, 0, j + 1)

    def ends(self, r: Any, sequence: Any, j: Any, n: Any, count: Any) -> jax.Array:
        """Whether step n, the j-th of the sequence, is the last of its part."""
        return (j + 1 == r.sequences[sequence, 1]) | (n + 1 == count)

    def walk(self, r: Any, body: Callable[..., Any], carry: Any) -> None:
        """``body(carry, n, sequence, j, last)`` of every step."""
        sequence, j, count = self.start(r)

        def step(n: Any, state: Any) -> Any:
            sequence, j, carry = state
            carry = body(carry, n, sequence, j, self.ends(r, sequence, j, n, count))
            return *self.following(r, sequence, j), carry

        lax.fori_loop(0, count, step, (sequence, j, carry))

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
            plgpu.wgmma_wait(1)  # values of the step before start behind all but the last product
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

            @pl.when(last)
            def finish() -> None:
                plgpu.barrier_arrive(r.p_ready)  # no scores of this sequence follow
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

    def __call__(
        self, q: jax.Array, cache: jax.Array, tables: jax.Array, runs: jax.Array,
        sequences: jax.Array,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Outputs of whole sequences ``[b, rows, 512]``; sums of parts, float32: o ``[parts, rows,
        512]``; m and total ``[parts + b, rows]``.

        q ``[b, rows, 576]``, cache ``[pages, page, 576]``, tables ``[b, columns]``, the rest as
        ``shares`` has them. Parts that no program has are whatever the memory held.
        """
        names = ("q", "cache", "tables", "runs", "sequences", "whole", "o", "m", "total")

        def body(*refs: Any, **scratch: Any) -> None:
            r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch)
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
            ),
            scratch_types=self._scratch(),
            grid=(self.groups * self.blocks,),
            grid_names=("program",),
            num_threads=HALVES + 1,
            thread_name="wg",
            kernel_name="mla_decode",
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=0,
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            ),
        )
        return kernel(q, cache, tables, runs, sequences)
