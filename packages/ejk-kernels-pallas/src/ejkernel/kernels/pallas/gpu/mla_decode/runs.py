"""How a program walks its run of steps, on Hopper: sequences, their pages, and what a run cuts.

What the walk needs comes from the lengths alone (``deal``); ``shares`` says what the runs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # query rows of a program
SHIFT = 6
STEP = 1 << SHIFT  # tokens of a step


def scale_of(k_scale: Any, sequence: Any) -> jax.Array | None:
    """The factor of a sequence's rows of the cache, from ``k_scale [1 or b]``; None: 1."""
    if k_scale is None:
        return None
    return k_scale[sequence if k_scale.shape[0] > 1 else 0]


def unit(c: float, scale: jax.Array | None) -> Any:
    """What a product with such rows is worth in powers of two, without its sign."""
    if scale is None:
        return c
    return jnp.maximum(jnp.abs(scale) * c, jnp.finfo(jnp.float32).tiny)


class Place(NamedTuple):
    """A step: of which sequence, its number in it, and the sequence's length."""

    sequence: Any
    j: Any
    length: Any

    @property
    def steps(self) -> Any:
        """Of the sequence."""
        return lax.shift_right_logical(self.length + (STEP - 1), SHIFT)

    @property
    def ended(self) -> Any:
        """Returns whether it is the sequence's last."""
        return self.j + 1 == self.steps

    def whole(self, n: Any) -> Any:
        """Returns whether it is the last, and the first was in this run, whose n-th it is."""
        return (n >= self.j) & self.ended


@dataclass(frozen=True)
class Runs:
    """Runs of one form.

    Attributes:
        batch, rows: sequences, and query rows of each, a multiple of 64.
        tokens: new tokens of a sequence; each has ``rows / tokens`` rows, a multiple of 64.
        page, pages, columns: tokens of a page, pages, and columns of the table.
        dtype: of queries, and of the cache as products read it.
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

    def block(self) -> tuple[jax.Array, jax.Array]:
        """(run, block of query rows) of this program."""
        program = lax.axis_index("program")
        return lax.div(program, self.blocks), lax.rem(program, self.blocks)

    def start(self, r: Any) -> Place:
        """Where this program's run begins."""
        sequence, j = r.run[:2]
        return Place(sequence, j, self.length(r, sequence))

    def count(self, r: Any) -> jax.Array:
        """Steps of this program's run."""
        return r.run[2]

    def part(self, r: Any, at: Place, n: Any) -> jax.Array:
        """Number of what this program sums of a sequence until step n of the run."""
        inside = self.block()[0] * 2 + (at.sequence != r.run[0]).astype(jnp.int32)
        return jnp.where(at.whole(n), 2 * self.groups + at.sequence, inside)

    def length(self, r: Any, sequence: Any) -> jax.Array:
        return jnp.clip(r.lengths[sequence], 0, self.capacity)

    def following(self, r: Any, at: Place) -> Place:
        """The next step; a sequence behind the last is any."""

        def empty(sequence: Any) -> Any:
            return (r.lengths[sequence] <= 0) & (sequence + 1 < self.batch)

        def next_one() -> Any:
            after = jnp.minimum(at.sequence + 1, self.batch - 1)
            after = lax.while_loop(empty, lambda s: s + 1, after)
            return after, jnp.int32(0), self.length(r, after)

        return Place(*lax.cond(at.ended, next_one, lambda: (at.sequence, at.j + 1, at.length)))

    def walk(self, r: Any, body: Callable[..., Any], carry: Any) -> Any:
        """``body(carry, n, place, whether it is the last of its part)`` of every step."""
        count = self.count(r)

        def step(n: Any, state: Any) -> Any:
            at, carry = state
            carry = body(carry, n, at, at.ended | (n + 1 == count))
            return self.following(r, at), carry

        return lax.fori_loop(0, count, step, (self.start(r), carry))[1]

    # ---- copies -----------------------------------------------------------------------------

    def boxes(self, r: Any, at: Place) -> list[tuple[int, Any, Any]]:
        """(first token in the step, page, first token in the page) of every copy of a step."""
        found = []
        for token in range(0, STEP, self.copied):
            column = jnp.minimum(lax.div(at.j * STEP + token, self.page), self.columns - 1)
            page = jnp.clip(r.tables[at.sequence, column], 0, self.pages - 1)
            first = 0 if self.page <= STEP else lax.rem(at.j, self.page // STEP) * STEP
            found.append((token, page, first))
        return found

    def load(self, r: Any, boxes: list, columns: Any, there: Any, ready: Any) -> None:
        for at, page, first in boxes:
            source = r.cache.at[page, pl.ds(first, self.copied), columns]
            plgpu.copy_gmem_to_smem(source, there.at[pl.ds(at, self.copied)], ready)
