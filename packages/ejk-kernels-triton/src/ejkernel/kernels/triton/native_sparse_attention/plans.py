"""The launches of the selected branch: which operand goes to which parameter, and the grid.

Every operand and result has a leading axis of batch rows, which a ``vmap`` axis multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out
from ejkernel.kernels.triton.common.pieces import lane_count, piece_count
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem, Sizes, padded
from ejkernel.kernels.triton.native_sparse_attention.tiles import Tiles, phases, piece_length
from ejkernel.kernels.triton.plan import Batched, KernelPlan, bound
from ejkernel.kernels.triton.targets import Target

OPERANDS = {
    "forward": ("q", "k", "v", "chosen"),
    "total": ("q", "k", "v", "chosen"),
    "dq": ("q", "k", "v", "chosen", "do", "base", "rest", "delta"),
    "pieces": ("q", "k", "v", "places", "bounds", "do", "base", "rest", "delta"),
    "dq of ds": ("k", "chosen", "ds"),
    "sums": ("dk_parts", "dv_parts", "bounds"),
}
PACKED = {
    "forward": ("starts",),
    "total": ("starts",),
    "dq": ("starts",),
    "dq of ds": ("starts",),
    "pieces": ("first_tokens",),
    "sums": ("first_tokens", "last_tokens"),
}

OTHERS = ("o_cmp", "o_swa", "g_cmp", "g_slc", "g_swa")
"""The other branches and all gates."""


@dataclass(frozen=True)
class SelectedPlan(Batched, KernelPlan):
    """One of the launches: ``forward``, or ``total`` which keeps nothing for gradients; ``dq``, or
    ``dq of ds``; ``pieces`` and ``sums`` of dk and dv.

    ``added``: names of what a forward pass adds, ``OTHERS`` that there are. ``some``: key heads of
    another launch, those before the ``last``; 0 = all.
    """

    problem: Problem
    tiles: Tiles
    kind: str
    added: tuple[str, ...] = ()
    some: int = 0
    last: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the operands, in order."""
        packed = PACKED[self.kind] if self.problem.packed else ()
        return (*OPERANDS[self.kind], *packed, *self.added)

    @property
    def pieces(self) -> int:
        p = self.problem
        return piece_count(p.entries, p.blocks, piece_length(p))

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p, parts = self.problem, self.problem.parts(self.tiles.keys) * self.tiles.keys
        some = self.some or p.kv_heads
        lead, summed = (p.batch, p.length), (p.batch * some, self.pieces, parts)
        shapes: dict[str, Any] = {
            "forward": ((*lead, p.heads, p.value_dim), (*lead, p.heads), (*lead, p.heads)),
            "total": ((*lead, p.heads, p.value_dim),),
            "dq": ((*lead, p.heads, p.dim),),
            "dq of ds": ((*lead, some * p.group, p.dim),),
            "pieces": ((*summed, p.dim), (*summed, p.value_dim)),
            "sums": ((*lead, some, p.dim), (*lead, some, p.value_dim)),
        }
        kinds = {"forward": (p.dtype, "float32", "float32"), "pieces": ("float32",) * 2}
        found = zip(shapes[self.kind], kinds.get(self.kind, (p.dtype,) * 2), strict=False)
        results = tuple(struct(kind, *shape) for shape, kind in found)
        if self.kind == "pieces" and p.keeps_ds:
            ds = (p.batch, some, p.length * power_of_two(p.slots), p.size, p.group)
            results = (*results, struct(p.dtype, *ds))
        if self.kind == "forward" and self.added:
            results = (*results, results[0])
        return results

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.native_sparse_attention import (
            dkv_kernel,
            dq_kernel,
            forward_kernel,
        )

        p, t, kind = self.problem, self.tiles, self.kind
        results: dict[str, tuple[str, ...]] = {
            "forward": ("o", "base", "rest", *(["total"] if self.added else [])),
            "total": ("total",),
            "dq": ("dq",),
            "dq of ds": ("dq",),
            "pieces": ("dk_parts", "dv_parts", *(["ds"] if p.keeps_ds else [])),
            "sums": ("dk", "dv"),
        }
        parts = p.parts(t.keys)
        members = min(power_of_two(p.group), t.heads)
        forward = (*OTHERS, "o", "base", "rest", "total")
        absent = {"forward": forward, "total": forward, "pieces": ("ds",)}.get(kind, ())
        arguments: dict[str, Any] = dict.fromkeys((*PACKED[kind], *absent))
        arguments |= {name: In(i) for i, name in enumerate(self.names)}
        arguments |= {name: Out(i) for i, name in enumerate(results[kind])}
        walks, products = kind not in ("pieces", "sums"), kind != "sums"
        in_turn = kind in ("dq of ds", "pieces", "sums")
        some = self.some or p.kv_heads
        arguments["of"] = Sizes(
            length=p.length,
            heads=p.heads if products else None,
            kv_heads=p.kv_heads,
            some=some if in_turn else None,
            last=(self.last or p.kv_heads) if in_turn else None,
            slots=p.slots if products else None,
            blocks=None if walks else p.blocks,
            entries=None if walks else p.entries,
            pieces=None if walks else self.pieces,
            size=p.size,
            slope=p.slope if products else None,
            scale=float(p.scale) if kind in ("dq", "dq of ds", "pieces") else None,
            sign=p.sign if products else None,
            D=p.dim,
            DV=p.value_dim,
            COLUMNS=padded(p.dim),
            VALUE_COLUMNS=padded(p.value_dim),
            GROUP=p.group,
            ROWS=min(padded(p.group), t.heads),
            SPLITS=-(-p.group // (members if kind == "pieces" else t.heads)),
            SLOTS=power_of_two(p.slots),
            MEMBERS=members,
            TOKENS=max(t.tokens, 16 // members),
            KEYS=t.keys,
            PARTS=parts,
            EVEN=p.size % t.keys == 0,
            PHASES=phases(p, t, kind),
            LENGTH=piece_length(p),
            LANES=lane_count(p.blocks),
            PRECISION=p.precision,
        )
        tokens = p.length * -(-p.group // t.heads)
        kernel, programs = {
            "forward": (forward_kernel.selected_fwd, tokens),
            "total": (forward_kernel.selected_fwd, tokens),
            "dq": (dq_kernel.selected_dq, tokens),
            "dq of ds": (dq_kernel.sum_dq, tokens),
            "pieces": (dkv_kernel.selected_dkv, self.pieces * parts),
            "sums": (dkv_kernel.sum_of_pieces, p.blocks * parts),
        }[kind]
        warps, stages = (4, 1) if kind == "sums" else (t.num_warps, t.num_stages)
        grid = (p.batch * some * programs,)
        return bound(kernel, arguments, grid, warps, stages)
