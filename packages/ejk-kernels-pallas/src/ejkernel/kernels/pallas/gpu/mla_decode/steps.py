"""Latent decoding on Hopper: 64 query rows against runs of the paged cache, a row read once.

    s_j = q . c_j,  p_j = exp2(c (s_j - m)),  l = sum_j p_j,  o = sum_j p_j c_j[:latent]

Work split: a program has 64 query rows and a run of steps of 64 tokens (``shares``); the programs
of one run follow each other, so that the second reads the cache from L2. One warpgroup copies rows
of the cache to shared memory by TMA, a box for every page of a step; one multiplies them by the
queries and makes probabilities; two add them up over half the columns of the values each, 128
registers a thread. So the sums of a step are added while the scores of the next are computed, and
each product is done once. Scores do not run further ahead: both would then wait for memory that
the other holds, of which there is enough for two steps.

What is summed is scaled anew only where a row's maximum has grown by more than ``SLACK`` powers of
two. Rows of the cache behind the last are set to 0 before they are added, whatever they were.

Bound: 2 * rows * (dim + latent) operations a token; at 128 rows 146 GFLOP for 64 sequences of 8192,
0.21 ms at 690 TFLOP/s, more than the 0.14 ms in which 604 MB are read at 4.3 TB/s.

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

from ejkernel.kernels.pallas import compat
from ejkernel.kernels.pallas.gpu.common.masks import LAYOUT, ROW, hide_outside, read
from ejkernel.kernels.pallas.gpu.common.rows import scale_rows
from ejkernel.kernels.pallas.gpu.common.tma import tiled
from ejkernel.types.structure import Band

F32 = jnp.float32
ROWS = 64  # query rows of a program
STEP = 64  # tokens of a step
STAGES = 2  # steps in shared memory
LATENT, ROPE = 512, 64
HALVES = 2  # of the values' columns, one to a warpgroup
HALF = LATENT // HALVES
COLUMNS = 128  # of one product: more sums than ptxas lets an instruction of 512 threads have
SLACK = 8.0
SCORES, COPIES = HALVES, HALVES + 1  # the warpgroups after those of the values
REGISTERS = {"values": 176, "scores": 136, "copies": 24}  # of a thread


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

    def copy(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["copies"], action="decrease")
        rows = pl.ds(self.place()[1] * ROWS, ROWS)

        def queries(sequence: Any, part: Any) -> None:
            pl.when(part > 0)(lambda: plgpu.barrier_wait(r.q_free))
            for i in range(HALVES):
                columns = pl.ds(i * HALF, HALF)
                plgpu.copy_gmem_to_smem(r.q.at[sequence, rows, columns], r.q_main.at[i], r.q_ready)
            columns = pl.ds(LATENT, ROPE)
            plgpu.copy_gmem_to_smem(r.q.at[sequence, rows, columns], r.q_rope, r.q_ready)

        def step(carry: Any, n: Any, sequence: Any, j: Any, last: Any) -> Any:
            new, part = carry
            pl.when(new)(lambda: queries(sequence, part))
            slot = lax.rem(n, STAGES)
            pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(r.free.at[slot]))
            for at in range(0, STEP, self.copied):
                column = jnp.minimum(lax.div(j * STEP + at, self.page), self.columns - 1)
                page = jnp.clip(r.tables[sequence, column], 0, self.pages - 1)
                first = 0 if self.page <= STEP else lax.rem(j, self.page // STEP) * STEP
                found = r.cache.at[page, pl.ds(first, self.copied)]
                here = pl.ds(at, self.copied)
                for i in range(HALVES):
                    source = found.at[:, pl.ds(i * HALF, HALF)]
                    plgpu.copy_gmem_to_smem(source, r.main.at[slot, i, here], r.ready.at[slot])
                source = found.at[:, pl.ds(LATENT, ROPE)]
                plgpu.copy_gmem_to_smem(source, r.rope.at[slot, here], r.ready.at[slot])
            return last, part + last.astype(jnp.int32)

        self.walk(r, step, (jnp.bool_(True), jnp.int32(0)))

    # ---- scores -----------------------------------------------------------------------------

    def score(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["scores"], action="increase")
        block = self.place()[1]
        sequence, j, count = self.start(r)
        token = lax.div(block * ROWS, self.rows // self.tokens)

        def product(s_acc: Any, slot: Any) -> Any:
            plgpu.barrier_wait(r.ready.at[slot])
            for i in range(HALVES):
                plgpu.wgmma(s_acc, r.q_main.at[i], r.main.at[slot, i].T)
            plgpu.wgmma(s_acc, r.q_rope, r.rope.at[slot].T)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
            plgpu.barrier_arrive(r.free.at[slot])
            return s

        def scores(n: Any, sequence: Any, j: Any) -> jax.Array:
            s = pl.run_scoped(
                lambda acc: product(acc, lax.rem(n, STAGES)), plgpu.ACC((ROWS, STEP), F32)
            )
            last = self.ends(r, sequence, j, n, count)
            pl.when(last)(lambda: plgpu.barrier_arrive(r.q_free))
            return s

        def publish(s: Any, n: Any, sequence: Any, j: Any, last: Any, m: Any, total: Any) -> Any:
            """Hands over the probabilities of a step; the state of the next."""
            s = -s if self.negative else s
            left = r.sequences[sequence, 0] - (self.tokens - 1 - token) - j * STEP

            def hide() -> jax.Array:
                return hide_outside(s, Band(), 0, columns_left=left)

            s = lax.cond(left < STEP, hide, lambda: s)
            top = jnp.maximum(m, jnp.max(s, axis=1))
            top = jnp.where(top > m + SLACK / self.c, top, m)
            # a token before the last may see nothing of a part
            shift = top if self.tokens == 1 else jnp.where(top == -jnp.inf, 0.0, top)
            p = jnp.exp2((s - lax.broadcast_in_dim(shift, s.shape, [0])) * self.c)
            alpha = jnp.exp2((m - shift) * self.c)
            total = total * alpha + jnp.sum(p, axis=1)
            pl.when(n > 0)(lambda: plgpu.barrier_wait(r.p_free))
            r.p[...] = p.astype(self.dtype)
            r.sums[0] = alpha

            @pl.when(last)
            def keep() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                r.sums[1] = top
                r.sums[2] = total

            plgpu.commit_smem()
            plgpu.barrier_arrive(r.p_ready)

            def finish() -> None:
                here = (self.part(r, sequence), pl.ds(block * ROWS, ROWS))
                plgpu.copy_smem_to_gmem(r.sums.at[1], r.m.at[here])
                plgpu.copy_smem_to_gmem(r.sums.at[2], r.total.at[here])

            pl.when(last)(finish)
            m = lax.cond(last, lambda: _rows_of(-jnp.inf), lambda: top)
            total = lax.cond(last, lambda: _rows_of(0.0), lambda: total)
            return m, total

        def step(n: Any, carry: Any) -> Any:
            sequence, j, s, *state = carry
            last = self.ends(r, sequence, j, n, count)
            state = publish(s, n, sequence, j, last, *state)
            sequence, j = self.following(r, sequence, j)
            pl.when(last)(lambda: plgpu.barrier_wait(r.q_ready))
            return sequence, j, scores(n + 1, sequence, j), *state

        def every() -> None:
            plgpu.barrier_wait(r.q_ready)
            s = scores(jnp.int32(0), sequence, j)
            carry = (sequence, j, s, _rows_of(-jnp.inf), _rows_of(0.0))
            *here, s, m, total = lax.fori_loop(0, count - 1, step, carry)
            publish(s, count - 1, *here, jnp.bool_(True), m, total)
            plgpu.wait_smem_to_gmem(0)

        pl.when(count > 0)(every)

    # ---- values -----------------------------------------------------------------------------

    def add(self, r: Any) -> None:
        plgpu.set_max_registers(REGISTERS["values"], action="increase")
        half = lax.axis_index("wg")
        rows = pl.ds(self.place()[1] * ROWS, ROWS)

        def clear(values: Any, left: Any) -> None:
            for c in range(0, HALF, 64):
                part = values.at[:, pl.ds(c, 64)]
                x = hide_outside(
                    read(part, LAYOUT).astype(F32), Band(), 0, rows_left=left, fill=0.0
                )
                part[...] = x.astype(self.dtype)
            plgpu.commit_smem()

        def finish(sequence: Any, *sums: Any) -> None:
            whole = self.whole(r, sequence)
            total = read(r.sums.at[2], ROW, optimized=False)
            share = 1.0 / jnp.where(total == 0.0, 1.0, total)
            for i, acc in enumerate(sums):
                columns = pl.ds(half * HALF + i * COLUMNS, COLUMNS)

                @pl.when(whole)
                def divided(acc: Any = acc, columns: Any = columns) -> None:
                    o = acc[...] * lax.broadcast_in_dim(share, (ROWS, COLUMNS), [0])
                    there = r.whole.at[sequence, rows, columns]
                    compat.store_registers(there, o.astype(self.dtype))

                @pl.when(jnp.logical_not(whole))
                def summed(acc: Any = acc, columns: Any = columns) -> None:
                    r.o[self.part(r, sequence), rows, columns] = acc[...]

                acc[...] = jnp.zeros((ROWS, COLUMNS), F32)

        def every(*sums: Any) -> None:
            def step(carry: Any, n: Any, sequence: Any, j: Any, last: Any) -> Any:
                slot = lax.rem(n, STAGES)
                values = r.main.at[slot, half]
                plgpu.barrier_wait(r.ready.at[slot])
                plgpu.barrier_wait(r.p_ready)
                left = r.sequences[sequence, 0] - j * STEP
                pl.when(left < STEP)(lambda: clear(values, left))
                alpha = read(r.sums.at[0], ROW, optimized=False)
                for acc in sums:
                    acc[...] = scale_rows(acc[...], alpha)
                for i, acc in enumerate(sums):
                    plgpu.wgmma(acc, r.p, values.at[:, pl.ds(i * COLUMNS, COLUMNS)])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(r.free.at[slot])
                pl.when(last)(lambda: finish(sequence, *sums))
                plgpu.barrier_arrive(r.p_free)
                return carry

            self.walk(r, step, jnp.int32(0))

        pl.run_scoped(every, *[plgpu.ACC((ROWS, COLUMNS), F32)] * (HALF // COLUMNS))

    # ---- launch -----------------------------------------------------------------------------

    def _scratch(self) -> dict[str, Any]:
        dtype = jnp.dtype(self.dtype)
        readers = HALVES + 1
        return {
            "q_main": tiled((HALVES, ROWS, HALF), dtype),
            "q_rope": tiled((ROWS, ROPE), dtype),
            "main": tiled((STAGES, HALVES, STEP, HALF), dtype),
            "rope": tiled((STAGES, STEP, ROPE), dtype),
            "p": tiled((ROWS, STEP), dtype),
            "sums": plgpu.SMEM((3, ROWS), F32),  # alpha, m, total
            "q_ready": plgpu.Barrier(num_arrivals=HALVES + 1),
            "q_free": plgpu.Barrier(),
            "ready": plgpu.Barrier(
                num_arrivals=(HALVES + 1) * (STEP // self.copied), num_barriers=STAGES
            ),
            "free": plgpu.Barrier(num_arrivals=readers, num_barriers=STAGES),
            "p_ready": plgpu.Barrier(),
            "p_free": plgpu.Barrier(num_arrivals=HALVES),
        }

    warpgroups = COPIES + 1

    def work(self, r: SimpleNamespace) -> None:
        """What each warpgroup does."""
        wg = lax.axis_index("wg")
        pl.when(wg == COPIES)(lambda: self.copy(r))
        pl.when(wg == SCORES)(lambda: self.score(r))
        pl.when(wg < HALVES)(lambda: self.add(r))

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
            self.work(SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch))

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
            num_threads=self.warpgroups,
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
