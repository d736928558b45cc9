"""The two launches of paged decoding: which operand goes to which kernel parameter, and the grid.

Scales and sinks have a leading axis of 1 (shared by all rows) or of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.launch import In, Launch, Out, Plan, TensorMap, power_of_two, runs_map
from ejkernel.kernels.triton.page_attention.groups import (
    Cache,
    Dims,
    Dots,
    Heads,
    Logits,
    Scale,
    Sequences,
    Sinks,
    Sizes,
)
from ejkernel.kernels.triton.page_attention.problem import BYTES, Problem
from ejkernel.kernels.triton.page_attention.tiles import Tiles, query_rows
from ejkernel.kernels.triton.targets import Target, instructions

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
MAX_LANES = 1024  # sequences looked at together when a share finds its place


def operand(shapes: Shapes, name: str, view: str | None = None) -> In | None:
    """The operand of a name, None where there is none."""
    names = [n for n, _ in shapes]
    return In(names.index(name), view) if name in names else None


def scale_arguments(shapes: Shapes, name: str) -> dict[str, Any]:
    """A scale ``[1 or batch, 1 or kv_heads]`` and its strides."""
    rows, heads = dict(shapes).get(name, (1, 1))
    return {
        name: operand(shapes, name),
        f"{name}_row": heads if rows > 1 else 0,
        f"{name}_head": 1 if heads > 1 else 0,
    }


def sink_arguments(shapes: Shapes) -> tuple[dict[str, Any], int]:
    """The sinks ``[1 or batch, heads, n]``, and n as a power of two."""
    rows, heads, n = dict(shapes).get("sink", (1, 1, 1))
    arguments = {
        "sink": operand(shapes, "sink"),
        "sink_row": heads * n if rows > 1 else 0,
        "sinks": n,
    }
    return arguments, power_of_two(n)


def cache_constants(problem: Problem, target: Target) -> dict[str, Any]:
    """Constants of every kernel whose products are with cached keys and values."""
    import triton.language as tl

    p = problem
    (d_main, d_rest), (dv_main, dv_rest) = p.parts
    numbers = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}
    k_kind, v_kind = (cache if BYTES[cache] == 1 else "" for cache in (p.key, p.value))
    return {
        "D": p.dim,
        "DV": p.value_dim,
        "D_MAIN": d_main,
        "D_REST": d_rest,
        "DV_MAIN": dv_main,
        "DV_REST": dv_rest,
        **p.places,
        "PAGE": p.page_size,
        "WINDOW": p.left is not None,
        "CAPPED": p.soft_cap is not None,
        "QK": numbers[p.number(p.key)],
        "PV": numbers[p.number(p.value)],
        "K_KIND": k_kind,
        "V_KIND": v_kind,
        "PTX": instructions(target),
        "NORMALISE": p.query == "bfloat16" and p.number(p.key) == "float16",
        "POSITIVE": p.scale > 0,
        "PRECISION": precision(p, target),
    }


def filled(group: Any, known: Mapping[str, Any], *first: Any) -> Any:
    """A group of ``first`` and, for its other fields, what is ``known`` by their names."""
    return group(*first, **{name: known[name] for name in group._fields[len(first) :]})


def precision(problem: Problem, target: Target) -> str:
    """Of float32 products. Three tf32 products cost nothing while memory is the limit, but their
    operands must fit the registers."""
    if target.platform != "cuda":
        return "ieee"
    return "tf32x3" if max(problem.dim, problem.value_dim) <= 128 else "tf32"


@dataclass(frozen=True)
class PagedPlan:
    """Common to both kernels.

    Attributes:
        problem, tiles: what is computed and how.
        shares: equal parts of the cache (with ``tiles.splits``: of all sequences together).
        shapes: name and shape of every operand, in order.
    """

    problem: Problem
    tiles: Tiles
    shares: int
    shapes: Shapes

    @property
    def direct(self) -> bool:
        """Whether the first kernel makes the output itself."""
        return self.tiles.splits == 1 and not self.problem.lse

    @property
    def rows(self) -> int:
        """Query rows of a sequence with their heads."""
        return self.problem.tokens * self.problem.heads

    @property
    def slots(self) -> int:
        """Partial results kept: consecutive shares of a sequence are consecutive slots."""
        p = self.problem
        if self.tiles.splits is None:
            return self.shares + p.batch - 1
        return 0 if self.direct else self.shares

    def operand(self, name: str, view: str | None = None) -> In | None:
        return operand(self.shapes, name, view)

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[Plan, Sequence[jax.Array]]:
        raise NotImplementedError("mapped axes join the batch before the kernels are planned")


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@dataclass(frozen=True)
class SplitPlan(PagedPlan):
    """q, k, v, lens, tables -> acc ``[slots, rows, dv]``, m, l ``[slots, rows]``,
    starts ``[b + 1]``.

    With one split a sequence: -> o ``[b, rows, dv]``.
    """

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        if self.direct:
            return (_struct((p.batch, self.rows, p.value_dim), p.query),)
        partial = (
            _struct((self.slots, self.rows, p.value_dim), "float32"),
            _struct((self.slots, self.rows), "float32"),
            _struct((self.slots, self.rows), "float32"),
        )
        if self.tiles.splits is None:
            return (*partial, _struct((p.batch + 1,), "int32"))
        return partial

    def cache(self) -> tuple[In | TensorMap | None, TensorMap | None, In | None]:
        """Keys by pointer, or by descriptors of both parts of a row, and values."""
        p, t = self.problem, self.tiles
        k_view, v_view = ("int16" if BYTES[cache] == 1 else None for cache in (p.key, p.value))
        k, rest = self.operand("k", k_view), None
        if t.maps:
            index, (_, columns) = [name for name, _ in self.shapes].index("k"), p.parts[0]
            each = 1 if k_view is None else 2  # numbers that are read as one
            dim, main, columns = p.dim // each, p.value_dim // each, columns // each
            rest = TensorMap(index, (p.pages * p.page_size, dim), (t.block, columns), view=k_view)
            k = runs_map(index, dim, (t.block, main), k_view)
        v = self.operand("v" if p.form is None else "k", v_view)
        return k, rest, v

    def launch(self, target: Target) -> Launch:
        import triton.language as tl
        from ejkernel.kernels.triton.page_attention.split_kernel import paged_split

        p, t = self.problem, self.tiles
        direct, balanced = self.direct, t.splits is None
        rows, chunks = query_rows(p, t.most)
        names = ("lens", "tables", "begins", "rows", "counts")
        sinks, sinks_padded = sink_arguments(self.shapes)
        known = cache_constants(p, target) | {
            "RAW": p.shared and (p.key == p.query or t.once),
            "APART": t.apart,
            "ONCE": None,
        }
        if t.once:
            number = {"float16": tl.float16, "bfloat16": tl.bfloat16}[p.query]
            known |= {"ONCE": p.key, "K_KIND": "", "V_KIND": "", "QK": number, "PV": number}
        arguments = {
            "q": self.operand("q"),
            "cache": filled(Cache, known, *self.cache()),
            "sequences": Sequences(*(self.operand(name) for name in names)),
            "k_scale": Scale(*scale_arguments(self.shapes, "k_scale").values()),
            "v_scale": Scale(*scale_arguments(self.shapes, "v_scale").values()),
            "sinks": Sinks(*sinks.values(), sinks_padded),
            "acc_out": None if direct else Out(0),
            "m_out": None if direct else Out(1),
            "l_out": None if direct else Out(2),
            "starts": Out(3) if balanced else None,
            "o": Out(0) if direct else None,
            "sizes": filled(Sizes, known, p.batch, self.shares, p.max_pages, p.pages, p.left or 0),
            "logits": filled(Logits, known, *p.logits.values()),
            "layout": Heads(p.heads, p.kv_heads, chunks, rows, p.tokens),
            "dims": filled(Dims, known),
            "dots": filled(Dots, known),
        }
        constants = {
            "BLOCK": t.block,
            "LANES": min(MAX_LANES, power_of_two(p.batch)),
            "SPLITS": t.splits or 0,
            "PTX": known["PTX"],
        }
        grid = (self.shares * p.kv_heads * chunks,)
        # left alone the assembler spills to fit more programs than are meant to run together
        registers = min(255, 2048 // (t.num_warps * t.per_core) // 8 * 8)
        options = {"maxnreg": registers} if target.platform == "cuda" else {}
        return Launch(
            paged_split, arguments, constants, grid, t.num_warps, t.num_stages, options,
            interpreted={"PTX": 0},
        )  # fmt: skip


@dataclass(frozen=True)
class MergePlan(PagedPlan):
    """acc, m, l, (starts,) -> o ``[b, rows, dv]`` in the query's dtype, and lse ``[b, rows]``."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        o = _struct((p.batch, self.rows, p.value_dim), p.query)
        return (o, _struct((p.batch, self.rows), "float32")) if p.lse else (o,)

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.page_attention.merge_kernel import paged_merge

        p, t = self.problem, self.tiles
        sinks, sinks_padded = sink_arguments(self.shapes)
        columns = max(16, power_of_two(p.value_dim))
        arguments = {
            "acc_in": self.operand("acc"),
            "m_in": self.operand("m"),
            "l_in": self.operand("l"),
            "starts": self.operand("starts"),
            **scale_arguments(self.shapes, "v_scale"),
            **sinks,
            "o": Out(0),
            "lse_out": Out(1) if p.lse else None,
            "batch": p.batch,
            "shares": self.shares,
        }
        constants = {
            "HEADS": p.heads,
            "TOKENS": p.tokens,
            "GROUP": p.group,
            "DV": p.value_dim,
            "COLUMNS": columns,
            # a few thousand floats a program: all of a long sequence's parts in one or two loads
            "PARTS": min(4096 // columns, power_of_two(t.splits or self.shares)),
            "SPLITS": t.splits or 0,
            "SINKS": sinks_padded,
        }
        return Launch(paged_merge, arguments, constants, (p.batch * self.rows,), 4, 1)
