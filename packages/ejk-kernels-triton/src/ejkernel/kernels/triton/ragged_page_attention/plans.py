"""The launches of a ragged call: which operand goes to which kernel parameter, and the grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out, TensorMap, runs_map
from ejkernel.kernels.triton.launch import Shapes, power_of_two, struct
from ejkernel.kernels.triton.page_attention.groups import Cache, Dots, Logits
from ejkernel.kernels.triton.page_attention.params import compute_dtype
from ejkernel.kernels.triton.page_attention.plans import (
    SplitPlan,
    expected_parts,
    kernel_params,
    parts_at_once,
    scale_of,
    sinks_of,
)
from ejkernel.kernels.triton.plan import Named, Unmapped, bound, filled, results
from ejkernel.kernels.triton.ragged_page_attention.groups import Layout, Sizes
from ejkernel.kernels.triton.ragged_page_attention.tiles import (
    Tiles,
    decode_problem,
    decode_shares,
    fair_parts,
    maps_pages,
    most_pieces,
)
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.serving.problem import ITEMSIZE, RaggedProblem

MAX_LANES = 1024  # sequences looked at together when a program finds its own
LINES = 32  # rows that a program sets to zero
MERGED = 4  # rows of a tile that a warp merges
MERGING = 16  # warps of a multiprocessor that merge, at least
NEAR = 16 << 20  # bytes of keys and values that programs walk over together
COPIED = 512  # elements that a warp copies at a time, 32 bytes of 16-bit numbers a thread


@dataclass(frozen=True)
class RaggedPlan(Named, Unmapped):
    """Common to the kernels.

    Attributes:
        problem, tiles: what is computed and how.
        target: the chip whose size decides the parts.
        shapes: name and shape of every operand, in order.
    """

    problem: RaggedProblem
    tiles: Tiles
    target: Target
    shapes: Shapes

    @property
    def fair(self) -> int:
        return fair_parts(self.problem, self.tiles, self.target)

    @property
    def lanes(self) -> int:
        return min(MAX_LANES, power_of_two(self.problem.sequences))

    @property
    def chunks(self) -> int:
        return -(-self.tiles.group // self.tiles.members)

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of everything that counts tiles."""
        p = self.problem.paged
        return {
            "HEADS": p.heads,
            "KV_HEADS": p.kv_heads,
            "CHUNKS": self.chunks,
            "ROWS": self.tiles.rows,
            "TILE": self.tiles.tile,
            "MEMBERS": self.tiles.members,
            "D": p.dim,
            "LANES": self.lanes,
        }


@dataclass(frozen=True)
class SchedulePlan(RaggedPlan):
    """starts, lens, valid -> lens, begins, rows, counts of decoded sequences; work, facts.

    For another kernel besides: its sequences, its tiles, the single rows it decodes.
    """

    @property
    def most_tiles(self) -> int:
        """Tiles of long prefill in any mix of sequences."""
        p, long = self.problem, self.tiles.long
        return 0 if long is None else long.max_tiles(p.rows, p.sequences)

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        n = self.problem.sequences
        found = (*[struct("int32", n)] * 4, struct("int32", 5, n), struct("int32", 6))
        if self.tiles.long is None:
            return found
        lines = struct("int32", self.most_tiles + 1, 8)
        return (*found, struct("int32", 5, n), lines, struct("int32", n, 3))

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.ragged_page_attention.schedule_kernel import ragged_schedule

        p, long = self.problem.paged, self.tiles.long
        arguments = {
            **{name: self.operand(name) for name in ("starts", "lens", "valid")},
            **results(
                dict.fromkeys(SCHEDULE, True) | dict.fromkeys(LONG_PREFILL, long is not None)
            ),
            "n": p.batch,
            "rows": self.problem.rows,
            "capacity": p.capacity,
            "left": p.window_left or 0,
            "fair": self.fair,
            "least": -(-self.tiles.least // self.tiles.block),
            "enough": long.min_total_rows if long else 0,
            "cores": target.cores,
            "most_tiles": self.most_tiles,
            "LANES": self.lanes,
            "WINDOW": p.window_left is not None,
            "BLOCK": self.tiles.block,
            "TOKENS": self.tiles.decode_tokens,
            "TILE": self.sizes["TILE"],
            "LONG": long.min_rows if long else 0,
            "SINGLE": long is not None and long.decodes,
            "HEADS": p.heads,
            "KV_HEADS": p.kv_heads,
            "BLOCK_Q": long.block_q if long else 1,
            "BLOCK_KV": long.block_kv if long else 1,
            "NEAR": NEAR // p.token_bytes,
            "COUNT": dict(self.shapes)["valid"][0] - 1,  # the last number says how many are valid
            "ONCE": p.batch <= self.lanes,
        }
        return bound(ragged_schedule, arguments, (1,), 4, 1)


SCHEDULE = ("d_lens", "d_begins", "d_rows", "d_counts", "work", "facts")
LONG_PREFILL = ("longs", "lines", "own")  # tables of another kernel


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
            struct(p.query_dtype, self.problem.rows, p.heads, p.dim),
            struct("float32", *slots, p.dim),
            struct("float32", *slots),
            struct("float32", *slots),
        )

    def cache(self, target: Target) -> tuple[In | TensorMap | None, None, TensorMap | None]:
        """The cache by a pointer, or by descriptors of keys and of values."""
        p, t = self.problem.paged, self.tiles
        if not maps_pages(p, t.block, target):
            return self.operand("k", "int16" if ITEMSIZE[p.key_dtype] == 1 else None), None, None
        index = self.names.index("k")
        heads, step = p.layout.heads, p.layout.key_stride
        keys = TensorMap(index, (p.pages * p.page_size, heads * step), (t.block, p.dim))
        return keys, None, runs_map(index, heads * step, (t.block, p.dim))

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.ragged_page_attention.prefill_kernel import ragged_prefill

        p, t = self.problem.paged, self.tiles
        programs = most_pieces(self.problem, t, self.fair) * p.kv_heads * self.chunks
        given = {} if t.long is None else {self.names.index("o"): 0}
        if given:
            # most calls leave few pieces
            programs = min(programs, target.cores * max(1, 8 // t.num_warps))
        known = {**self.sizes, **kernel_params(p, target), "LINES": LINES}
        # float16 has not the range for what it carries along, wide heads not the registers
        known["FUSED"] = compute_dtype(p, p.value_dtype) != "float16" and p.dim <= 128
        arguments = {
            **{name: self.operand(name) for name in ("q", "tables", "work", "facts")},
            "cache": filled(Cache, known, *self.cache(target)),
            "first_rows": self.operand("d_rows"),
            "k_scale": scale_of(self, "k_scale"),
            "v_scale": scale_of(self, "v_scale"),
            "sinks": sinks_of(self),
            "given": self.operand("o"),
            **results(dict.fromkeys(("o", "acc_out", "m_out", "l_out"), True)),
            "sizes": filled(Sizes, known, p.batch, self.problem.rows, programs),
            "logits": filled(Logits, known),
            "layout": filled(Layout, known),
            "dots": filled(Dots, known),
            "BLOCK": t.block,
            "LOOPED": bool(given),
        }
        grid = (programs + -(-self.problem.rows // LINES),)
        more: Any = {"known": known, "interpreted": {"PTX": 0}, "aliases": given}
        return bound(ragged_prefill, arguments, grid, t.num_warps, t.num_stages, **more)


@dataclass(frozen=True)
class RaggedMergePlan(RaggedPlan):
    """Parts of decoded rows and of tiles, and the prefill's o, which becomes the output.

    A call that writes its cache gets that as a result too.
    """

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p, cache = self.problem.paged, self.shape("k")
        o = struct(p.query_dtype, self.problem.rows, p.heads, p.dim)
        return (o,) if cache is None else (o, struct(p.key_dtype, *cache))

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.ragged_page_attention.merge_kernel import ragged_merge

        p, t = self.problem.paged, self.tiles
        names = ("d_acc", "d_m", "d_l", "d_starts", "d_counts", "work", "facts")
        shares = decode_shares(self.problem, t, self.target)
        cache = self.operand("k", "int8" if ITEMSIZE[p.key_dtype] == 1 else None)
        columns = max(16, power_of_two(p.dim))
        parts, warps = parts_at_once(columns, expected_parts(shares, p.batch))
        lines = MERGED * warps
        arguments = {
            **{name: self.operand(name) for name in (*names, "p_acc", "p_m", "p_l")},
            "first_rows": self.operand("d_rows"),
            "v_scale": scale_of(self, "v_scale"),
            "sinks": sinks_of(self),
            "given": self.operand("o"),
            "cache_in": cache,
            "o": Out(0),
            "cache": cache and Out(1, cache.view),
            "n": p.batch,
            "rows": self.problem.rows,
            "cache_size": math.prod(self.shape("k") or (0,)),
            "shares": shares,
            "TOKENS": t.decode_tokens,
            "COLUMNS": columns,
            "PARTS": parts,
            "LINES": lines,
            "COPIED": warps * COPIED,
        }
        pieces = p.batch * p.heads + self.fair * p.kv_heads * self.chunks * (t.rows // lines)
        # most calls have few cut tiles: programs for all would begin and end
        programs = min(pieces, target.cores * MERGING * (2 if warps > 1 else 1) // warps)
        aliases = {self.names.index("o"): 0} | ({cache.index: 1} if cache else {})
        more: Any = {"known": self.sizes, "aliases": aliases}
        return bound(ragged_merge, arguments, (programs,), warps, 1, **more)


def decode_plan(problem: RaggedProblem, tiles: Tiles, target: Target, shapes: Shapes) -> SplitPlan:
    """The split kernel over decoded sequences; the others have length 0."""
    shares = decode_shares(problem, tiles, target)
    return SplitPlan(decode_problem(problem, tiles), tiles.decode, shares, shapes)
