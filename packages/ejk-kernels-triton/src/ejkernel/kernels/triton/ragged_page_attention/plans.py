"""The launches of a ragged call: which operand goes to which kernel parameter, and the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.launch import In, Launch, Out, Plan, TensorMap, power_of_two, runs_map
from ejkernel.kernels.triton.page_attention.groups import Cache, Dims, Logits, Scale, Sinks
from ejkernel.kernels.triton.page_attention.plans import (
    MAX_LANES,
    SplitPlan,
    cache_constants,
    filled,
    operand,
    scale_arguments,
    sink_arguments,
)
from ejkernel.kernels.triton.page_attention.problem import BYTES
from ejkernel.kernels.triton.ragged_page_attention.groups import Dots, Layout, Sizes
from ejkernel.kernels.triton.ragged_page_attention.problem import Ragged
from ejkernel.kernels.triton.ragged_page_attention.tiles import (
    Tiles,
    decode_shares,
    fair_parts,
    maps_pages,
    most_pieces,
)
from ejkernel.kernels.triton.targets import Target

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
LINES = 32  # rows that a program sets to zero
MERGED = 16  # rows of a tile that a program merges


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@dataclass(frozen=True)
class RaggedPlan:
    """Common to the kernels.

    Attributes:
        problem, tiles: what is computed and how.
        target: the chip whose size decides the parts.
        shapes: name and shape of every operand, in order.
    """

    problem: Ragged
    tiles: Tiles
    target: Target
    shapes: Shapes

    def __call__(self, name: str, view: str | None = None) -> In | None:
        """The operand of a name."""
        return operand(self.shapes, name, view)

    @property
    def fair(self) -> int:
        return fair_parts(self.problem, self.tiles, self.target)

    @property
    def lanes(self) -> int:
        return min(MAX_LANES, power_of_two(self.problem.sequences))

    @property
    def chunks(self) -> int:
        group = self.problem.paged.group
        return -(-group // self.tiles.members(group))

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of everything that counts tiles."""
        p, group = self.problem.paged, self.problem.paged.group
        return {
            "HEADS": p.heads,
            "KV_HEADS": p.kv_heads,
            "CHUNKS": self.chunks,
            "ROWS": self.tiles.rows,
            "TILE": self.tiles.tile(group),
            "MEMBERS": self.tiles.members(group),
            "D": p.dim,
            "LANES": self.lanes,
        }

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[Plan, Sequence[jax.Array]]:
        raise NotImplementedError("mapped calls run one after the other")


@dataclass(frozen=True)
class SchedulePlan(RaggedPlan):
    """starts, lens, valid -> lens, begins, rows, counts of decoded sequences; work, facts."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        n = self.problem.sequences
        return (*[_struct((n,), "int32")] * 4, _struct((5, n), "int32"), _struct((5,), "int32"))

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.ragged_page_attention.schedule_kernel import ragged_schedule

        p, long = self.problem.paged, self.tiles.long
        arguments = {
            **{name: self(name) for name in ("starts", "lens", "valid")},
            **{name: Out(i) for i, name in enumerate(SCHEDULE)},
            "n": p.batch,
            "rows": self.problem.rows,
            "capacity": p.capacity,
            "left": p.left or 0,
            "fair": self.fair,
            "least": -(-self.tiles.least // self.tiles.block),
            "enough": long.enough if long else 0,
        }
        constants = {
            "LANES": self.lanes,
            "WINDOW": p.left is not None,
            "BLOCK": self.tiles.block,
            "TOKENS": p.tokens,
            "TILE": self.sizes["TILE"],
            "LONG": long.least if long else 0,
        }
        return Launch(ragged_schedule, arguments, constants, (1,), 4, 1)


SCHEDULE = ("d_lens", "d_begins", "d_rows", "d_counts", "work", "facts")


@dataclass(frozen=True)
class PrefillPlan(RaggedPlan):
    """q, k, tables, d_rows, work, facts, ..., o -> o ``[T, h, d]``, acc, m, l of parts.

    An o that is given has the rows of sequences of another kernel.

    Rows of decoded sequences are left for the merge.
    """

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem.paged
        slots = (self.fair, p.kv_heads * self.chunks, self.tiles.rows)
        return (
            _struct((self.problem.rows, p.heads, p.dim), p.query),
            _struct((*slots, p.dim), "float32"),
            _struct(slots, "float32"),
            _struct(slots, "float32"),
        )

    def cache(self, target: Target) -> tuple[In | TensorMap | None, None, TensorMap | None]:
        """The cache by a pointer, or by descriptors of keys and of values."""
        p, t = self.problem.paged, self.tiles
        if not maps_pages(p, t.block, target):
            return self("k", "int16" if BYTES[p.key] == 1 else None), None, None
        index = [name for name, _ in self.shapes].index("k")
        heads, step = p.form or (p.kv_heads, 2 * p.dim)
        keys = TensorMap(index, (p.pages * p.page_size, heads * step), (t.block, p.dim))
        return keys, None, runs_map(index, heads * step, (t.block, p.dim))

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.ragged_page_attention.prefill_kernel import ragged_prefill

        p, t = self.problem.paged, self.tiles
        sinks, sinks_padded = sink_arguments(self.shapes)
        programs = most_pieces(self.problem, t, self.fair) * p.kv_heads * self.chunks
        given = {} if t.long is None else {self("o").index: 0}
        if given:
            # most calls leave few pieces
            programs = min(programs, target.cores * max(1, 8 // t.num_warps))
        known = {**self.sizes, **cache_constants(p, target), "LINES": LINES}
        # float16 has not the range for what it carries along, wide heads not the registers
        known["FUSED"] = p.number(p.value) != "float16" and p.dim <= 128
        arguments = {
            "q": self("q"),
            "cache": filled(Cache, known, *self.cache(target)),
            "tables": self("tables"),
            "first_rows": self("d_rows"),
            "work": self("work"),
            "facts": self("facts"),
            "k_scale": Scale(*scale_arguments(self.shapes, "k_scale").values()),
            "v_scale": Scale(*scale_arguments(self.shapes, "v_scale").values()),
            "sinks": Sinks(*sinks.values(), sinks_padded),
            "given": self("o"),
            "o": Out(0),
            "acc_out": Out(1),
            "m_out": Out(2),
            "l_out": Out(3),
            "sizes": filled(
                Sizes,
                known,
                p.batch,
                self.problem.rows,
                programs,
                p.max_pages,
                p.pages,
                p.left or 0,
            ),
            "logits": filled(Logits, known, *p.logits.values()),
            "layout": filled(Layout, known),
            "dims": filled(Dims, known),
            "dots": filled(Dots, known),
        }
        constants = {"BLOCK": t.block, "LOOPED": bool(given), "PTX": known["PTX"]}
        grid = programs + -(-self.problem.rows // LINES)
        return Launch(
            ragged_prefill, arguments, constants, (grid,), t.num_warps, t.num_stages,
            interpreted={"PTX": 0}, aliases=given,
        )  # fmt: skip


@dataclass(frozen=True)
class RaggedMergePlan(RaggedPlan):
    """Parts of decoded rows and of tiles, and the prefill's o, which becomes the output."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem.paged
        return (_struct((self.problem.rows, p.heads, p.dim), p.query),)

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.ragged_page_attention.merge_kernel import ragged_merge

        p, t = self.problem.paged, self.tiles
        sinks, sinks_padded = sink_arguments(self.shapes)
        names = ("d_acc", "d_m", "d_l", "d_starts", "d_counts", "work", "facts")
        shares = decode_shares(self.problem, t, self.target)
        arguments = {
            **{name: self(name) for name in (*names, "p_acc", "p_m", "p_l")},
            "first_rows": self("d_rows"),
            **scale_arguments(self.shapes, "v_scale"),
            **sinks,
            "given": self("o"),
            "o": Out(0),
            "n": p.batch,
            "shares": shares,
        }
        columns = max(16, power_of_two(p.dim))
        constants = {
            **self.sizes,
            "TOKENS": p.tokens,
            "COLUMNS": columns,
            "PARTS": min(4096 // columns, power_of_two(shares)),
            "LINES": MERGED,
            "SINKS": sinks_padded,
        }
        lines = t.rows // MERGED
        grid = p.batch * p.heads + self.fair * p.kv_heads * self.chunks * lines
        aliases = {arguments["given"].index: 0}
        return Launch(ragged_merge, arguments, constants, (grid,), 4, 1, aliases=aliases)


def decode_plan(problem: Ragged, tiles: Tiles, target: Target, shapes: Shapes) -> SplitPlan:
    """The split kernel over decoded sequences; the others have length 0."""
    shares = decode_shares(problem, tiles, target)
    return SplitPlan(problem.paged, tiles.decode, shares, shapes)
