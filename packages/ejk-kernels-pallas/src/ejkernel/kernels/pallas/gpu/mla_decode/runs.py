"""How a program walks its run of steps, on Hopper: sequences, their pages, and what a run cuts.

What the walk needs comes from the lengths alone (``deal``); ``shares`` says what the runs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # query rows of a program
SHIFT = 6
STEP = 1 << SHIFT  # tokens of a step


@dataclass(frozen=True)
class Runs:
    """Runs of one form.

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
    def capacity(self) -> int:
        """Tokens that a row of the table can name."""
        return self.page * self.columns

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
        return r.run[:3]

    def part(self, r: Any, sequence: Any, n: Any, j: Any) -> jax.Array:
        """Number of what this program sums of a sequence until step n, its j-th."""
        inside = self.place()[0] * 2 + (sequence != r.run[0]).astype(jnp.int32)
        return jnp.where(self.whole(r, sequence, n, j), 2 * self.groups + sequence, inside)

    def whole(self, r: Any, sequence: Any, n: Any, j: Any) -> jax.Array:
        """Whether step n, the j-th, is a sequence's last and the first was in this run."""
        return (n >= j) & (j + 1 == self.steps(r, sequence))

    def length(self, r: Any, sequence: Any) -> jax.Array:
        return jnp.clip(r.lengths[sequence], 0, self.capacity)

    def steps(self, r: Any, sequence: Any) -> jax.Array:
        return lax.shift_right_logical(self.length(r, sequence) + (STEP - 1), SHIFT)

    def following(self, r: Any, sequence: Any, j: Any) -> tuple[jax.Array, jax.Array]:
        """The next step; a sequence behind the last is any."""

        def empty(sequence: Any) -> Any:
            return (r.lengths[sequence] <= 0) & (sequence + 1 < self.batch)

        def next_one() -> Any:
            after = jnp.minimum(sequence + 1, self.batch - 1)
            return lax.while_loop(empty, lambda s: s + 1, after)

        ended = j + 1 == self.steps(r, sequence)
        return lax.cond(ended, next_one, lambda: sequence), jnp.where(ended, 0, j + 1)

    def ends(self, r: Any, sequence: Any, j: Any, n: Any, count: Any) -> jax.Array:
        """Whether step n, the j-th of the sequence, is the last of its part."""
        return (j + 1 == self.steps(r, sequence)) | (n + 1 == count)

    def walk(self, r: Any, body: Callable[..., Any], carry: Any) -> Any:
        """``body(carry, n, sequence, j, last)`` of every step."""
        sequence, j, count = self.start(r)

        def step(n: Any, state: Any) -> Any:
            sequence, j, carry = state
            carry = body(carry, n, sequence, j, self.ends(r, sequence, j, n, count))
            return *self.following(r, sequence, j), carry

        return lax.fori_loop(0, count, step, (sequence, j, carry))[2]

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

    def plan(self, r: Any, sequence: Any, n: Any, j: Any) -> None:
        """Says what is to be merged if a sequence begins here and goes on in the next run.

        Step n, the j-th, is the last of this run that the sequence has.
        """
        run, block = self.place()
        left = self.steps(r, sequence) - (j + 1)

        @pl.when((block == 0) & (n >= j) & (left > 0))
        def cut() -> None:
            r.cuts[run, 0] = sequence
            r.cuts[run, 1] = self.part(r, sequence, n, j)
            r.cuts[run, 2] = 1 + lax.div(left + r.run[3] - 1, r.run[3])
