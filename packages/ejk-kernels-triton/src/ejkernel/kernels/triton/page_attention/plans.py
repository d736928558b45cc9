"""The two launches of paged decoding: which operand goes to which kernel parameter, and the grid.

Scales and sinks have a leading axis of 1 (shared by all rows) or of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out, TensorMap, runs_map
from ejkernel.kernels.triton.launch import Shapes, power_of_two, struct
from ejkernel.kernels.triton.page_attention.groups import (
    Cache,
    Dots,
    Heads,
    Logits,
    Scale,
    Sequences,
    Side,
    Sinks,
    Sizes,
)
from ejkernel.kernels.triton.page_attention.params import (
    column_parts,
    compute_dtype,
    layout_params,
    logit_params,
)
from ejkernel.kernels.triton.page_attention.tiles import Tiles, query_rows
from ejkernel.kernels.triton.plan import Named, Unmapped, bound, filled
from ejkernel.kernels.triton.targets import Target, instructions
from ejkernel.types.serving.problem import ITEMSIZE, PagedProblem

# sequences looked at together when a share finds its place: what one warp holds is summed without
# the others, and the compiler unrolls so many rounds
LANES, ROUNDS = 32, 8


def scale_of(plan: Named, name: str) -> Scale:
    """A scale ``[1 or batch, 1 or kv_heads]``."""
    rows, heads = plan.shape(name) or (1, 1)
    return Scale(plan.operand(name), heads if rows > 1 else 0, 1 if heads > 1 else 0)


def sinks_of(plan: Named) -> Sinks:
    """The sinks ``[1 or batch, heads, n]``."""
    rows, heads, n = plan.shape("sink") or (1, 1, 1)
    return Sinks(plan.operand("sink"), heads * n if rows > 1 else 0, n, power_of_two(n))


def kernel_params(problem: PagedProblem, target: Target, once: bool = False) -> dict[str, Any]:
    """Numbers and constants of every kernel whose products are with cached keys and values."""
    import triton.language as tl

    p, places = problem, layout_params(problem)

    def side(name: str, cache: str, dim: int, parts: tuple[int, int], whole: str | None) -> Side:
        kind = cache if ITEMSIZE[cache] == 1 and not once else ""
        number = getattr(tl, p.query_dtype if once else compute_dtype(p, cache))
        return Side(
            places[f"{name}_HEADS"], places[f"{name}_STEP"], dim, *parts, kind, whole, number
        )

    return {
        "K": side("K", p.key_dtype, p.dim, column_parts(p)[0], p.key_dtype if once else None),
        "V": side("V", p.value_dtype, p.value_dim, column_parts(p)[1], None),
        "V_FIRST": places["V_FIRST"],
        **logit_params(p),
        "max_pages": p.max_pages,
        "pages": p.pages,
        "left": p.window_left or 0,
        "PAGE": p.page_size,
        "WINDOW": p.window_left is not None,
        "CAPPED": p.soft_cap is not None,
        "PTX": instructions(target),
        "NORMALISE": p.query_dtype == "bfloat16" and compute_dtype(p, p.key_dtype) == "float16",
        "POSITIVE": p.scale > 0,
        "PRECISION": precision(p, target),
        "FORM": "",
        "BIASED": False,
        "RAW": False,
        "APART": False,
        "FUSED": False,
    }


def precision(problem: PagedProblem, target: Target) -> str:
    """Of float32 products. Three tf32 products cost nothing while memory is the limit, but their
    operands must fit the registers."""
    if target.platform != "cuda":
        return "ieee"
    return "tf32x3" if max(problem.dim, problem.value_dim) <= 128 else "tf32"


def expected_parts(shares: int, batch: int) -> int:
    """Of a sequence of middling length."""
    return -(-shares // batch) + 2


def parts_at_once(columns: int, expected: int, width: int = 4) -> tuple[int, int]:
    """Partial results that a program of the merge loads together, and its warps.

    ``expected``: of a sequence; ``width``: bytes of a number.
    """
    # all in one load, but a few thousand floats at most
    parts = min(4096 // columns, power_of_two(expected))
    return parts, max(1, parts * columns * width // 4096)  # more would wait for each other


@dataclass(frozen=True)
class PagedPlan(Named, Unmapped):
    """Common to both kernels.

    Attributes:
        problem, tiles: what is computed and how.
        shares: equal parts of the cache (with ``tiles.splits``: of all sequences together).
        shapes: name and shape of every operand, in order.
    """

    problem: PagedProblem
    tiles: Tiles
    shares: int
    shapes: Shapes

    @property
    def direct(self) -> bool:
        """Returns whether the first kernel makes the output itself."""
        return self.tiles.splits == 1 and not self.problem.return_lse

    @property
    def rows(self) -> int:
        """Query rows of a sequence with their heads."""
        return self.problem.tokens * self.problem.heads

    @property
    def part_dtype(self) -> str:
        """Of partial results. Averages of 8-bit numbers fit float16; rounding them errs by 2^-12 of
        a part, less than rounding the output to bfloat16 where parts do not cancel."""
        short = self.tiles.form != "" and self.problem.query_dtype == "bfloat16"
        return "float16" if short else "float32"

    @property
    def slots(self) -> int:
        """Partial results kept: consecutive shares of a sequence are consecutive slots."""
        p = self.problem
        if self.tiles.splits is None:
            return self.shares + p.batch - 1
        return 0 if self.direct else self.shares


@dataclass(frozen=True)
class SplitPlan(PagedPlan):
    """q, k, v, lens, tables -> acc ``[slots, rows, dv]``, m, l ``[slots, rows]``,
    starts ``[b + 1]``.

    With one split a sequence: -> o ``[b, rows, dv]``.
    """

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        if self.direct:
            return (struct(p.query_dtype, p.batch, self.rows, p.value_dim),)
        sums = struct("float32", self.slots, self.rows)
        partial = (struct(self.part_dtype, self.slots, self.rows, p.value_dim), sums, sums)
        if self.tiles.splits is None:
            return (*partial, struct("int32", p.batch + 1))
        return partial

    def cache(self) -> tuple[In | TensorMap | None, TensorMap | None, In | None]:
        """Keys by pointer, or by descriptors of both parts of a row, and values."""
        p, t = self.problem, self.tiles
        k_view, v_view = (
            "int16" if ITEMSIZE[dtype] == 1 else None for dtype in (p.key_dtype, p.value_dtype)
        )
        k, rest = self.operand("k", k_view), None
        if t.maps:
            index, (_, columns) = self.names.index("k"), column_parts(p)[0]
            each = 1 if k_view is None else 2  # numbers that are read as one
            dim, main, columns = p.dim // each, p.value_dim // each, columns // each
            rest = TensorMap(index, (p.pages * p.page_size, dim), (t.block, columns), view=k_view)
            k = runs_map(index, dim, (t.block, main), k_view)
        v = self.operand("k" if p.layout.value_offset else "v", v_view)
        return k, rest, v

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.page_attention.split_kernel import paged_split

        p, t = self.problem, self.tiles
        direct, balanced = self.direct, t.splits is None
        rows, chunks = query_rows(p, t.most)
        lanes = max(LANES, power_of_two(p.batch) // ROUNDS)
        names = ("lens", "tables", "begins", "rows", "counts")
        known = kernel_params(p, target, t.once) | {
            "RAW": p.layout.is_latent and (p.key_dtype == p.query_dtype or t.once),
            "APART": t.apart,
            "FORM": t.form,
            "BIASED": t.form == "digits",
        }
        arguments = {
            "q": self.operand("q"),
            "cache": filled(Cache, known, *self.cache()),
            "sequences": Sequences(*(self.operand(name) for name in names)),
            "k_scale": scale_of(self, "k_scale"),
            "v_scale": scale_of(self, "v_scale"),
            "sinks": sinks_of(self),
            "acc_out": None if direct else Out(0),
            "m_out": None if direct else Out(1),
            "l_out": None if direct else Out(2),
            "starts": Out(3) if balanced else None,
            "o": Out(0) if direct else None,
            "sizes": filled(Sizes, known, p.batch, self.shares),
            "logits": filled(Logits, known),
            "layout": Heads(p.heads, p.kv_heads, chunks, rows, p.tokens),
            "dots": filled(Dots, known),
            "BLOCK": t.block,
            "LANES": lanes,
            "ROUNDS": -(-power_of_two(p.batch) // lanes),
            "SPLITS": t.splits or 0,
            "OPENING": 0 if t.splits else t.opening,
        }
        grid = (self.shares * p.kv_heads * chunks,)
        # left alone the assembler spills to fit more programs than are meant to run together
        registers = min(255, 2048 // (t.num_warps * t.per_core) // 8 * 8)
        options = {"maxnreg": registers} if target.platform == "cuda" else {}
        more: Any = {"known": known, "interpreted": {"PTX": 0}}
        found = bound(paged_split, arguments, grid, t.num_warps, t.num_stages, options, **more)
        if t.form and compat.has_gluon():
            from ejkernel.kernels.triton.page_attention import latent_kernel

            if latent_kernel.suits(p, t):
                return latent_kernel.launch(known | arguments, found, p.batch)
        return found


@dataclass(frozen=True)
class MergePlan(PagedPlan):
    """acc, m, l, (starts,) -> o ``[b, rows, dv]`` in the query's dtype, and lse ``[b, rows]``."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        o = struct(p.query_dtype, p.batch, self.rows, p.value_dim)
        return (o, struct("float32", p.batch, self.rows)) if p.return_lse else (o,)

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.page_attention.merge_kernel import paged_merge

        p, t = self.problem, self.tiles
        whole = max(16, power_of_two(p.value_dim))
        # where a sequence has many parts a program has few columns, and loads them together too
        expected = t.splits or expected_parts(self.shares, p.batch)
        columns = max(min(whole, 4096 // power_of_two(expected)), min(whole, 32))
        parts, warps = parts_at_once(columns, expected, ITEMSIZE[self.part_dtype])
        arguments = {
            "acc_in": self.operand("acc"),
            "m_in": self.operand("m"),
            "l_in": self.operand("l"),
            "starts": self.operand("starts"),
            "v_scale": scale_of(self, "v_scale"),
            "sinks": sinks_of(self),
            "o": Out(0),
            "lse_out": Out(1) if p.return_lse else None,
            "batch": p.batch,
            "shares": self.shares,
            "HEADS": p.heads,
            "TOKENS": p.tokens,
            "GROUP": p.group,
            "DV": p.value_dim,
            "COLUMNS": columns,
            "CHUNKS": whole // columns,
            "PARTS": parts,
            "SPLITS": t.splits or 0,
            "OPENING": 0 if t.splits else t.opening,
        }
        grid = (p.batch * self.rows * (whole // columns),)
        return bound(paged_merge, arguments, grid, warps, 1)
