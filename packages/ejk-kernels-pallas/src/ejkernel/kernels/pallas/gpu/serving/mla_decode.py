"""Latent decoding on Hopper: 64 query rows against a range of the paged cache, each row read once.

    s_j = q . c_j,  p_j = exp2(u (s_j - m)),  l = sum_j p_j,  o = sum_j p_j c_j[:latent]

Work split: a program has 64 query rows and one unit of the split schedule
(``types.serving.split``), a range of steps of 64 tokens; in batch-invariant calls one of the splits
that a sequence decides for itself. The programs of one unit are neighbours,
so that the second reads the cache from L2. One of a program's three warpgroups multiplies cache
rows by the queries and makes probabilities. The other two accumulate half of the value columns
each, 128 registers a thread. So the values of a step are accumulated while the scores of the next
are computed.

Queries in shared memory would be read by every matmul of scores: 72 KB, as much again as the cache.
They would also leave room for two steps of the cache, and the next scores would wait for a load
that starts when the last values are accumulated. So the score warpgroup holds 448 of the 576 query
columns in 112 registers a thread for as long as a sequence lasts, and there is room for three
steps. ptxas keeps 24 registers for itself: with 512 columns, or fewer registers for the values, it
serialises the matmuls. The mainloop of scores is over the steps of one sequence: with queries read
in a branch of a loop over all steps, ptxas spills 22 to 32 of these registers and reads them again
in every step, before its matmuls.

No warpgroup only copies. The warpgroup that has read a part of a step last starts the TMA copies of
the same part of a later step, a box for every page. The two value warpgroups load their halves of
the columns three steps ahead; the score warpgroup loads the rotary columns one step ahead.

The values of a step are accumulated behind the next scores, during the exponentials: if they
started with those scores, nothing would fill the tensor cores during the exponentials.
Probabilities wait in registers until the next scores are started, so that the scores wait neither
for values nor for writes to shared memory (0.263 -> 0.245 ms on an H200, 64 sequences of 8192). The
score warpgroup decides how fast a step is: it reads page indices before the matmul and lengths once
a sequence (0.237), and lanes share values only where they must (``lane_softmax``, 0.227).

At the end of a partial result its last probabilities do not wait: values are accumulated and
written while the queries of the next sequence are read, 16 bytes a lane either way
(``vector_rows``).

A unit of a single sequence is short, and most of its instructions run once. Its queries come
through the buffer of its third step, which is needed last, and its results leave through the buffer
of its last step: the copy engine moves them, and four matrices an instruction (``matrix_rows``).
The kernel has 2,144 instructions for 2,728 (8k tokens 26.0 -> 24.1 us a call in chains on an H200,
32k 35.9 -> 33.4).

Accumulators are rescaled only where a row's maximum has grown by more than ``SLACK`` powers of two.
Cache rows behind the last are zeroed before they are used, because 0 * NaN is NaN.

8-bit caches (``EightBitLatentLoader``): rows arrive as they are, two steps ahead, next to the
buffers of two steps of 16-bit rows. Where the values of a step are accumulated, its buffer is free:
each value warpgroup converts its half of the step after the next there, the first columns during
the matmuls of the other columns, and those during the exponentials of the next step. The score
warpgroup converts the rotary columns, behind the matmuls that do not need them. Half as many bytes
are read as of 16-bit rows, and the matmuls are the same. Every 8-bit value is exact in float16 and
bfloat16.

Bound: 2 * rows * (dim + latent) operations a token; at 128 rows 146 GFLOP for 64 sequences of 8192,
0.21 ms at 690 TFLOP/s, more than the 0.14 ms in which 604 MB are read at 4.3 TB/s. Cycles of a
step, each matmul at its full rate: scores 1152, values 1024; shared memory at 128 bytes a cycle
2112: 64 KB + 8 KB of the cache and 16 KB of queries for the scores, 64 KB and four times 8 KB of
probabilities for the values, 72 + 8 KB written. 8-bit rows are read and written once more in shared
memory: 0.298 ms of float8_e4m3fn, 0.213 of bfloat16. A third step of 16-bit rows, with 8-bit rows
in its buffer until they are converted, takes the same; float16 rows for bfloat16 queries take 4%
less, and converting the queries 5% more.

Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1; Shah et al. 2024, FlashAttention-3 (arXiv
2407.08608), section 3.1 (warp specialisation); Dao et al. 2023, "Flash-Decoding for long-context
inference".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.pallas import compat
from ejkernel.kernels.pallas.common.units import unit as natural_unit
from ejkernel.kernels.pallas.gpu.common.lane_softmax import (
    lane_sums,
    raise_maxima,
    sum_over_lanes,
    to_16_bit,
)
from ejkernel.kernels.pallas.gpu.common.masks import hide_outside
from ejkernel.kernels.pallas.gpu.common.matrix_rows import read_matrices, write_matrices
from ejkernel.kernels.pallas.gpu.common.registers import LAYOUT, ROW, read
from ejkernel.kernels.pallas.gpu.common.rows import clear_rows, scale_rows
from ejkernel.kernels.pallas.gpu.common.tma import tiled
from ejkernel.kernels.pallas.gpu.common.vector_rows import load_rows, store_rows
from ejkernel.kernels.pallas.gpu.common.warps import OWN_BARRIERS
from ejkernel.kernels.pallas.gpu.serving.mla_loader import (
    COLUMNS,
    HALF,
    HALVES,
    LATENT,
    ROPE,
    STAGES,
    STEP,
    EightBitLatentLoader,
    LatentLoader,
    LatentStep,
)
from ejkernel.kernels.pallas.gpu.serving.mla_split import find_split, find_unit
from ejkernel.types.attention.problem import LOG2E
from ejkernel.types.masks.structure import Band
from ejkernel.types.serving.problem import LatentProblem
from ejkernel.types.serving.split import (
    CutSequence,
    SplitUnit,
    fixed_split,
    max_fixed_splits,
    unit_of_one,
)

F32 = jnp.float32
ROWS = 64  # query rows of a program
HELD = ((0, 0, 256), (1, 256, 192))  # (half, first column, columns) of queries in registers
Q_TAIL = LATENT - 64  # first column of the queries in shared memory
ALPHA, SHARE = range(2)  # rows of ``row_factors``
SLACK = 8.0
SCORES = HALVES  # number of the score warpgroup, after the value warpgroups
REGISTERS = {"values": 160, "scores": 184}  # of a thread
MAX_SORTED = 128  # sequences that every warp sorts: four of a lane, which take no memory


def scale_of(k_scale: Any, sequence: Any) -> jax.Array | None:
    """Returns the scale of a sequence's cache rows from ``k_scale [1 or b]``; None: 1."""
    if k_scale is None:
        return None
    return k_scale[sequence if k_scale.shape[0] > 1 else 0]


def scaled_unit(log2_unit: float, scale: jax.Array | None) -> Any:
    """Returns the absolute base-2 logit of a dot product of 1 with rows of such a scale."""
    if scale is None:
        return log2_unit
    return jnp.maximum(jnp.abs(scale) * log2_unit, jnp.finfo(jnp.float32).tiny)


def _rows_of(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, F32), ROW)


@dataclass(frozen=True)
class MLADecodeKernel:
    """The kernel of one problem.

    Attributes:
        problem: sizes and dtypes. Each new token has ``heads`` query rows, a multiple of 64.
        cores: multiprocessors.
        batch_invariant: whether units are splits that each sequence decides for itself.
    """

    problem: LatentProblem
    cores: int
    batch_invariant: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a sequence."""
        return self.problem.tokens * self.problem.heads

    @property
    def dtype(self) -> str:
        """The dtype of matmuls."""
        return self.problem.query_dtype

    @property
    def blocks(self) -> int:
        """Programs of a unit."""
        return self.rows // ROWS

    @property
    def splits(self) -> int:
        """Units of a sequence, where each decides for itself."""
        return max_fixed_splits(self.problem.capacity, STEP)

    @property
    def units(self) -> int:
        if self.batch_invariant:
            return self.problem.batch * self.splits
        return max(1, self.cores // self.blocks)

    @property
    def partials(self) -> int:
        """Partial results of all units; complete sequences come after them."""
        return self.units if self.batch_invariant else 2 * self.units

    @property
    def cut_units(self) -> int:
        """Units with a ``CutSequence``; of fixed splits the first of every sequence."""
        return self.problem.batch if self.batch_invariant else self.units

    @property
    def sorts_splits(self) -> bool:
        """Returns whether units are fixed splits in the order of ``split_order``, longest first.

        The order decides when a split is computed, and none of its bits.
        """
        return self.batch_invariant and self.problem.batch <= MAX_SORTED

    @property
    def reads_early(self) -> bool:
        """Returns whether queries are read before the length of their only sequence."""
        return self.problem.batch == 1

    @property
    def stages_rows(self) -> bool:
        """Returns whether queries and results go through buffers of the cache.

        Queries go through the buffer of the third step, results through that of their last step.
        """
        is_alone = self.problem.batch == 1 and not self.batch_invariant
        return is_alone and self.loader.stages == STAGES

    @property
    def is_single(self) -> bool:
        """Returns whether a unit has steps of one sequence only."""
        return self.batch_invariant or self.problem.batch == 1

    @property
    def log2_unit(self) -> float:
        """Absolute base-2 logit of a dot product of 1: u above, for a cache without a scale."""
        return natural_unit(self.problem) * LOG2E

    @property
    def loader(self) -> LatentLoader:
        p = self.problem
        is_16_bit = p.key_dtype == p.query_dtype
        return LatentLoader(self) if is_16_bit else EightBitLatentLoader(self)

    # ---- the range of a unit ----------------------------------------------------------------

    def program_position(self) -> tuple[jax.Array, jax.Array]:
        """Returns (unit, block of query rows) of this program."""
        program = lax.axis_index("program")
        return lax.div(program, self.blocks), lax.rem(program, self.blocks)

    def find_range(self, r: Any) -> tuple[SplitUnit, jax.Array | None]:
        """Returns the range of this program's unit, and its number among its sequence's splits.

        The number is None where units are not fixed splits.
        """
        p, unit = self.problem, self.program_position()[0]
        if self.batch_invariant:
            if self.sorts_splits:
                sequence, split = find_split(r.lengths, unit, step=STEP, capacity=p.capacity)
            else:
                # the first splits of all sequences come first, splits that may be empty last
                split, sequence = lax.div(unit, p.batch), lax.rem(unit, p.batch)
            first, steps, splits = fixed_split(self.length(r, sequence), split, step=STEP)
            partials = jnp.where(splits > 1, splits, 0)
            cut = CutSequence(sequence, sequence * self.splits, partials, unit * 0)
            return SplitUnit(sequence, first, steps, cut), split
        if p.batch == 1:
            return unit_of_one(self.length(r, 0), unit, units=self.units, step=STEP), None
        sizes = {"units": self.units, "step": STEP, "capacity": p.capacity}
        return find_unit(r.lengths, unit, **sizes), None

    def first_step(self, r: Any) -> LatentStep:
        sequence = r.unit.sequence
        return LatentStep(sequence, r.unit.step, self.length(r, sequence))

    def partial(self, r: Any, at: LatentStep, n: Any) -> jax.Array:
        """Returns the index of the result that this program has of a sequence after step n."""
        if self.batch_invariant:
            inside = at.sequence * self.splits + r.split
        else:
            unit = self.program_position()[0]
            inside = unit * 2 + (at.sequence != r.unit.sequence).astype(jnp.int32)
        return jnp.where(at.is_complete(n), self.partials + at.sequence, inside)

    def length(self, r: Any, sequence: Any) -> jax.Array:
        return jnp.clip(r.lengths[sequence], 0, self.problem.capacity)

    def next_step(self, r: Any, at: LatentStep) -> LatentStep:
        """Returns the step after ``at``; behind the last sequence, any."""
        batch = self.problem.batch
        if self.is_single:
            return at._replace(j=at.j + 1)

        def is_empty(sequence: Any) -> Any:
            return (r.lengths[sequence] <= 0) & (sequence + 1 < batch)

        def next_sequence() -> Any:
            after = jnp.minimum(at.sequence + 1, batch - 1)
            after = lax.while_loop(is_empty, lambda s: s + 1, after)
            return after, jnp.int32(0), self.length(r, after)

        same = (at.sequence, at.j + 1, at.length)
        return LatentStep(*lax.cond(at.is_last, next_sequence, lambda: same))

    def for_each_step(self, r: Any, body: Callable[..., Any], carry: Any) -> Any:
        """Runs ``carry = body(carry, n, step, is_last_of_partial)`` for every step."""
        count = r.unit.steps

        def step(n: Any, state: Any) -> Any:
            at, carry = state
            ends = n + 1 == count
            carry = body(carry, n, at, ends if self.is_single else at.is_last | ends)
            return self.next_step(r, at), carry

        return lax.fori_loop(0, count, step, (self.first_step(r), carry))[1]

    # ---- scores -----------------------------------------------------------------------------

    def load_queries(self, r: Any, sequence: Any) -> tuple[Any, ...]:
        """Returns the columns of this program's queries in registers; starts to copy the others."""
        rows = pl.ds(self.program_position()[1] * ROWS, ROWS)
        tail = pl.ds(Q_TAIL, LATENT + ROPE - Q_TAIL)
        plgpu.copy_gmem_to_smem(r.q.at[sequence, rows, tail], r.q_tail, r.q_full)
        if not self.stages_rows:
            return tuple(load_rows(r.q.at[sequence, rows, pl.ds(first, n)]) for _, first, n in HELD)
        staged = r.main.at[STAGES - 1]
        for half in range(HALVES):
            source = r.q.at[sequence, rows, pl.ds(half * HALF, HALF)]
            plgpu.copy_gmem_to_smem(source, staged.at[half], r.q_full)
        plgpu.barrier_wait(r.q_full)
        q_regs = tuple(read_matrices(staged.at[half, :, pl.ds(0, n)]) for half, _, n in HELD)
        plgpu.barrier_arrive(r.q_read)
        return q_regs

    def compute_scores(self, r: Any) -> None:
        """Makes the probabilities of this program's unit: the part of the score warpgroup."""
        plgpu.set_max_registers(REGISTERS["scores"], action="increase")
        p, loader = self.problem, self.loader
        block = self.program_position()[1]
        token = lax.div(block * ROWS, self.rows // p.tokens)
        early = self.load_queries(r, 0) if self.reads_early else None
        r.unit, r.split = self.find_range(r)
        count = r.unit.steps
        self.store_cut(r, block)
        loop = ScoreLoop(self, r, block, token, count)

        def attend(n: Any, at: LatentStep) -> tuple[Any, LatentStep]:
            # read here and not in the mainloop, where registers that a branch may write are spilled
            # and read again in every step
            q_regs = self.load_queries(r, at.sequence) if early is None else early
            return loop.attend(q_regs, n, at)

        @pl.when(count > 0)
        def compute() -> None:
            if early is None:
                loader.load_rope(r, loader.boxes(r, self.first_step(r)))
            state = (jnp.int32(0), self.first_step(r))
            if self.is_single:
                attend(*state)
            else:
                lax.while_loop(lambda x: x[0] < count, lambda x: attend(*x), state)

        if early is not None and not self.stages_rows:
            # no copy may arrive behind the end of a program
            pl.when(count == 0)(lambda: plgpu.barrier_wait(r.q_full))

    def store_cut(self, r: Any, block: Any) -> None:
        """Stores the unit's ``CutSequence`` for the merge, in one program of the unit."""
        unit = self.program_position()[0]
        stores, line = unit < self.cut_units, unit
        if self.batch_invariant:
            stores, line = r.split == 0, r.unit.sequence

        @pl.when((block == 0) & stores)
        def store() -> None:
            for i, x in enumerate(r.unit.cut):
                r.cut_sequences[line, i] = x

    # ---- values -----------------------------------------------------------------------------

    def accumulate_values(self, r: Any) -> None:
        """Computes half of the columns of this program's outputs: the part of a value warpgroup."""
        plgpu.set_max_registers(REGISTERS["values"], action="decrease")
        loader = self.loader
        half = lax.axis_index("wg")
        rows = pl.ds(self.program_position()[1] * ROWS, ROWS)
        r.unit, r.split = self.find_range(r)
        count = r.unit.steps
        if self.reads_early:  # the score warpgroup is waiting for queries
            first = lambda: loader.load_rope(r, loader.boxes(r, self.first_step(r)))  # noqa: E731
            pl.when((half == HALVES - 1) & (count > 0))(first)

        def store(at: LatentStep, n: Any, *values: Any) -> None:
            sequence, complete, partial = at.sequence, at.is_complete(n), self.partial(r, at, n)
            share = read(r.row_factors.at[SHARE], ROW, optimized=False)
            scale = scale_of(r.k_scale, sequence)
            share = share if scale is None else share * scale
            if self.stages_rows:  # no step follows
                staged = r.main.at[lax.rem(n, loader.stages), half]
                for i, x in enumerate(values):
                    write_matrices(staged.at[:, pl.ds(i * COLUMNS, COLUMNS)], x, share)
                plgpu.commit_smem()
                index, copy = (rows, pl.ds(half * HALF, HALF)), plgpu.copy_smem_to_gmem
                pl.when(complete)(lambda: copy(staged, r.o.at[sequence, *index]))
                incomplete = jnp.logical_not(complete)
                pl.when(incomplete)(lambda: copy(staged, r.partial_o.at[partial, *index]))
                return
            for i, x in enumerate(values):
                columns = pl.ds(half * HALF + i * COLUMNS, COLUMNS)
                # neither index is behind its array where the other one counts
                output = r.o.at[sequence, rows, columns]
                inside = r.partial_o.at[jnp.where(complete, 0, partial), rows, columns]
                store_rows(output, x, share, other=inside, use=complete)

            plgpu.commit_smem()  # all warps have read what is overwritten from here on

        def accumulate(*accs: Any) -> None:
            def step(ahead: LatentStep, n: Any, at: LatentStep, is_last: Any) -> Any:
                slot = lax.rem(n, loader.stages)
                values = r.main.at[slot, half]
                boxes = loader.boxes_before_wait(r, ahead)
                plgpu.barrier_wait(r.main_full.at[slot])
                plgpu.barrier_wait(r.p_full)
                alpha = read(r.row_factors.at[ALPHA], ROW, optimized=False)
                for acc in accs:
                    acc[...] = scale_rows(acc[...], alpha, clear=True)
                for i, acc in enumerate(accs):
                    columns = pl.ds(i * COLUMNS, COLUMNS)
                    plgpu.wgmma(acc, r.p, values.at[:, columns])
                loader.during_matmuls(r, n, half, count)
                # one value before and in the branch: two would be in registers together
                loaded = [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accs]
                loader.after_matmuls(r, n, boxes, half, count)
                pl.when(is_last)(lambda: store(at, n, *loaded))
                for acc, x in zip(accs, loaded, strict=True):
                    acc[...] = x
                plgpu.barrier_arrive(r.p_empty)
                loader.after_step(r, n, ahead, half, count)
                return self.next_step(r, ahead)

            self.for_each_step(r, step, loader.load_first(r, half, count))

        pl.run_scoped(accumulate, *[plgpu.ACC((ROWS, COLUMNS), F32)] * (HALF // COLUMNS))
        if self.stages_rows:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # ---- launch -----------------------------------------------------------------------------

    def scratch(self) -> dict[str, Any]:
        """Returns shared memory and barriers by name, in the order of their addresses."""
        loaded = self.loader.scratch()
        rope, rope_full, main_full = (loaded.pop(x) for x in ("rope", "rope_full", "main_full"))
        return {
            **loaded,
            "p": tiled((ROWS, STEP), self.dtype),
            "q_tail": tiled((ROWS, LATENT + ROPE - Q_TAIL), self.dtype),
            "rope": rope,
            "row_factors": plgpu.SMEM((SHARE + 1, ROWS), F32),  # an array takes 1 KB at least
            "p_empty": plgpu.Barrier(num_arrivals=HALVES),
            "p_full": plgpu.Barrier(),
            "q_full": plgpu.Barrier(num_arrivals=1 + HALVES * self.stages_rows),
            **({"q_read": plgpu.Barrier()} if self.stages_rows else {}),
            "main_full": main_full,
            "rope_full": rope_full,
        }

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the results by name.

        o has the outputs of complete sequences; the others are unset. Partial results are outputs
        of some of the keys, partial_o ``[partials, rows, 512]``, and in float32 m and total
        ``[partials + b, rows]``. Those that no program has are unset. cut_sequences ``[cuts, 4]``
        are the ``CutSequence`` of every unit, in batch-invariant calls of every sequence.
        """
        batch, partials = self.problem.batch, self.partials
        sums = jax.ShapeDtypeStruct((partials + batch, self.rows), F32)
        cut_sequences = (self.cut_units, len(CutSequence._fields))
        return {
            "o": jax.ShapeDtypeStruct((batch, self.rows, LATENT), self.dtype),
            # in float32 17 MB of one sequence that fills the chip: as many us as several steps
            "partial_o": jax.ShapeDtypeStruct((partials, self.rows, LATENT), self.dtype),
            "m": sums,
            "total": sums,
            "cut_sequences": jax.ShapeDtypeStruct(cut_sequences, jnp.int32),
        }

    def __call__(
        self, q: jax.Array, cache: jax.Array, tables: jax.Array, lengths: jax.Array,
        k_scale: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Returns the arrays of ``outputs``.

        q ``[b, rows, 576]``, cache ``[pages, page, 576]``, tables ``[b, columns]``, lengths
        ``[b]``, k_scale float32 ``[1 or b]``: the scale of the cache.
        """
        inputs = {"q": q, "cache": cache, "tables": tables, "lengths": lengths}
        if k_scale is not None:
            inputs["k_scale"] = k_scale
        outputs, scratch = self.outputs(), self.scratch()

        def body(*refs: Any) -> None:
            # each warpgroup adds the unit and the split that it finds
            arrays = dict(zip((*inputs, *outputs, *scratch), refs, strict=True))
            r = SimpleNamespace(**({"k_scale": None} | self.loader.named(arrays)))
            wg = lax.axis_index("wg")
            pl.when(wg == SCORES)(lambda: self.compute_scores(r))
            pl.when(wg < HALVES)(lambda: self.accumulate_values(r))

        kernel = plgpu.kernel(
            body,
            out_type=tuple(outputs.values()),
            scratch_types=list(scratch.values()),
            grid=(self.units * self.blocks,),
            grid_names=("program",),
            num_threads=HALVES + 1,
            thread_name="wg",
            kernel_name="mla_decode",
            compiler_params=OWN_BARRIERS,
        )
        return kernel(*inputs.values())


class Softmax(NamedTuple):
    """The softmax of a sequence up to a step.

    Attributes:
        probs: 16-bit probabilities of the step.
        alpha: factor of the values accumulated before it.
        m: shift of each row, its maximum or up to ``SLACK`` less.
        total: sum of probabilities in each lane.
    """

    probs: Any
    alpha: Any
    m: Any
    total: Any


@dataclass(frozen=True)
class ScoreLoop:
    """The loop of the score warpgroup over the steps of a sequence.

    Attributes:
        kernel: the kernel.
        r: references.
        block: block of query rows.
        token: new token of these rows.
        count: steps of the unit.
    """

    kernel: MLADecodeKernel
    r: Any
    block: Any
    token: Any
    count: Any

    def attend(self, q_regs: Any, n: Any, at: LatentStep) -> tuple[Any, LatentStep]:
        """Computes the steps of one sequence, of which the n-th of the unit is the first.

        Returns the number of the next step and the step.
        """
        r, kernel = self.r, self.kernel
        steps = jnp.minimum(self.count - n, at.steps - at.j)
        if not kernel.stages_rows:
            plgpu.barrier_wait(r.q_full)

        def some_step(i: Any, carry: Any) -> Any:
            at, *state = carry
            state = self.step(q_regs, n + i, at, i == 0, Softmax(*state))
            return at._replace(j=at.j + 1), *state

        no_probs = plgpu.layout_cast(jnp.zeros((ROWS, STEP), kernel.dtype), LAYOUT)
        state = (no_probs, _rows_of(0.0), _rows_of(-jnp.inf), _rows_of(0.0))
        _, *state = lax.fori_loop(0, steps, some_step, (at, *state))
        softmax = Softmax(*state)
        # accumulated and written while the next queries are loaded
        last = n + steps - 1
        self.publish(last, softmax, jnp.bool_(True))
        plgpu.barrier_arrive(r.p_full)
        at = at._replace(j=at.j + steps - 1)
        target = (kernel.partial(r, at, last), pl.ds(self.block * ROWS, ROWS))
        compat.store_registers(r.m.at[target], softmax.m)
        compat.store_registers(r.total.at[target], sum_over_lanes(softmax.total))
        return last + 1, kernel.next_step(r, at)

    def step(self, q_regs: Any, n: Any, at: LatentStep, is_first: Any, before: Softmax) -> Softmax:
        """Returns the softmax after step n; publishes that of the step before."""
        r, kernel, p = self.r, self.kernel, self.kernel.problem
        loader = kernel.loader
        slot = lax.rem(n, loader.stages)
        # read before the matmul, used after it
        boxes = loader.boxes(r, kernel.next_step(r, at))
        scale = scale_of(r.k_scale, at.sequence)
        s = pl.run_scoped(
            lambda acc: self.multiply(acc, q_regs, n, jnp.logical_not(is_first), before),
            plgpu.ACC((ROWS, STEP), F32),
        )
        pl.when(n + 1 < self.count)(lambda: loader.load_rope(r, boxes))
        log2_unit = scaled_unit(kernel.log2_unit, scale)
        s = -s if p.scale < 0.0 else s
        s = s if scale is None else s * jnp.where(scale < 0, -1.0, 1.0)
        left = at.length - (p.tokens - 1 - self.token) - at.j * STEP

        def hide() -> jax.Array:
            return hide_outside(s, Band(), 0, columns_left=left)

        s = lax.cond(left < STEP, hide, lambda: s)
        m = raise_maxima(before.m, s, SLACK / log2_unit)
        # a token before the last may see nothing of a partial result
        shift = m if p.tokens == 1 else jnp.where(m == -jnp.inf, 0.0, m)
        alpha = jnp.exp2((before.m - shift) * log2_unit)
        probs = jnp.exp2((s - lax.broadcast_in_dim(shift, s.shape, [0])) * log2_unit)
        total = lane_sums(probs, before.total, alpha)
        probs = to_16_bit(probs, kernel.dtype)
        left = at.length - at.j * STEP
        pl.when(left < STEP)(lambda: _clear_values(r.main.at[slot], left))
        return Softmax(probs, alpha, m, total)

    def multiply(self, s_acc: Any, q_regs: Any, n: Any, has_probs: Any, before: Softmax) -> Any:
        """Returns the dot products of step n; publishes ``before`` while they are computed."""
        r, loader = self.r, self.kernel.loader
        slot = lax.rem(n, loader.stages)
        plgpu.barrier_wait(r.main_full.at[slot])
        for x, (half, _, columns) in zip(q_regs, HELD, strict=True):
            plgpu.wgmma(s_acc, x, r.main.at[slot, half, :, pl.ds(0, columns)].T)
        tail = r.main.at[slot, HALVES - 1, :, pl.ds(HALF - 64, 64)]
        plgpu.wgmma(s_acc, r.q_tail.at[:, pl.ds(0, 64)], tail.T)
        loader.wait_rope(r)
        plgpu.wgmma(s_acc, r.q_tail.at[:, pl.ds(64, ROPE)], r.rope.T)
        pl.when(has_probs)(lambda: self.publish(n - 1, before, jnp.bool_(False)))
        plgpu.wgmma_wait(1)  # the values of the step before start behind all but one matmul
        pl.when(has_probs)(lambda: plgpu.barrier_arrive(r.p_full))
        return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

    def publish(self, n: Any, softmax: Softmax, is_last: Any) -> None:
        """Writes the probabilities of step n, and after the last the share of the values."""
        r = self.r
        pl.when(n > 0)(lambda: plgpu.barrier_wait(r.p_empty))
        r.p[...] = softmax.probs
        r.row_factors[ALPHA] = softmax.alpha

        @pl.when(is_last)
        def divide() -> None:
            row_sum = sum_over_lanes(softmax.total)
            r.row_factors[SHARE] = 1.0 / jnp.where(row_sum == 0.0, 1.0, row_sum)

        plgpu.commit_smem()


def _clear_values(values: Any, left: Any) -> None:
    """Zeroes the rows of a step from the ``left``-th on, whatever they were."""
    for i in range(HALVES):
        clear_rows(values.at[i], 0, left)
