"""The launches of the selected branch: which operand goes to which parameter, and the grid.

Every operand and result has a leading axis of batch rows, which a ``vmap`` axis multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import merge_leading
from ejkernel.kernels.triton.common.sequences import lane_count, piece_count
from ejkernel.kernels.triton.launch import In, Launch, Out, power_of_two
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem
from ejkernel.kernels.triton.native_sparse_attention.tiles import Tiles, padded, piece_length
from ejkernel.kernels.triton.targets import Target

OPERANDS = {
    "forward": ("q", "k", "v", "chosen"),
    "dq": ("q", "k", "v", "chosen", "do", "base", "rest", "delta"),
    "pieces": ("q", "k", "v", "tokens", "bounds", "do", "base", "rest", "delta"),
    "sums": ("dk_parts", "dv_parts", "bounds"),
}
PACKED = {
    "forward": ("starts",),
    "dq": ("starts",),
    "pieces": ("first_tokens",),
    "sums": ("first_tokens", "last_tokens"),
}


@dataclass(frozen=True)
class SelectedPlan:
    """One of the four launches: ``forward``, ``dq``, ``pieces`` and ``sums`` of dk and dv."""

    problem: Problem
    tiles: Tiles
    kind: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of the operands, in order."""
        return (*OPERANDS[self.kind], *(PACKED[self.kind] if self.problem.packed else ()))

    @property
    def pieces(self) -> int:
        p = self.problem
        return piece_count(p.entries, p.blocks, piece_length(p))

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p, parts = self.problem, self.problem.parts(self.tiles.keys) * self.tiles.keys
        lead, summed = (p.batch, p.length), (p.batch * p.kv_heads, self.pieces, parts)
        shapes: dict[str, Any] = {
            "forward": ((*lead, p.heads, p.value_dim), (*lead, p.heads), (*lead, p.heads)),
            "dq": ((*lead, p.heads, p.dim),),
            "pieces": ((*summed, p.dim), (*summed, p.value_dim)),
            "sums": ((*lead, p.kv_heads, p.dim), (*lead, p.kv_heads, p.value_dim)),
        }
        kinds = {"forward": (p.dtype, "float32", "float32"), "pieces": ("float32",) * 2}
        found = zip(shapes[self.kind], kinds.get(self.kind, (p.dtype,) * 2), strict=False)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape, kind in found)

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.native_sparse_attention import (
            dkv_kernel,
            dq_kernel,
            forward_kernel,
        )

        p, t, kind = self.problem, self.tiles, self.kind
        results: dict[str, tuple[str, ...]] = {
            "forward": ("o", "base", "rest"),
            "dq": ("dq",),
            "pieces": ("dk_parts", "dv_parts"),
            "sums": ("dk", "dv"),
        }
        parts, walks = p.parts(t.keys), kind in ("forward", "dq")
        arguments: dict[str, Any] = dict.fromkeys(PACKED[kind])
        arguments |= {name: In(i) for i, name in enumerate(self.names)}
        arguments |= {name: Out(i) for i, name in enumerate(results[kind])}
        arguments |= {"length": p.length, "kv_heads": p.kv_heads, "size": p.size}
        constants: dict[str, Any] = {
            "D": p.dim,
            "DV": p.value_dim,
            "COLUMNS": padded(p.dim),
            "VALUE_COLUMNS": padded(p.value_dim),
            "KEYS": t.keys,
            "PARTS": parts,
        }
        if kind != "sums":
            arguments |= {"heads": p.heads, "slope": p.slope, "sign": p.sign}
            constants |= {"GROUP": p.group, "PRECISION": p.precision}
        if kind in ("dq", "pieces"):
            arguments |= {"scale": float(p.scale)}
        if walks:
            arguments |= {"slots": p.slots}
            constants |= {
                "ROWS": min(padded(p.group), t.heads),
                "SPLITS": -(-p.group // t.heads),
                "SLOTS": power_of_two(p.slots),
                "EVEN": p.size % t.keys == 0,
            }
        else:
            arguments |= {"blocks": p.blocks, "entries": p.entries, "pieces": self.pieces}
            constants |= {"LENGTH": piece_length(p)}
        if kind == "pieces":
            members = min(power_of_two(p.group), t.heads)
            constants |= {
                "MEMBERS": members,
                "SPLITS": -(-p.group // members),
                "TOKENS": max(t.tokens, 16 // members),
                "LANES": lane_count(p.blocks),
            }
        programs = {
            "forward": p.length * -(-p.group // t.heads),
            "dq": p.length * -(-p.group // t.heads),
            "pieces": self.pieces * parts,
            "sums": p.blocks * parts,
        }[kind]
        kernel = {
            "forward": forward_kernel.selected_fwd,
            "dq": dq_kernel.selected_dq,
            "pieces": dkv_kernel.selected_dkv,
            "sums": dkv_kernel.sum_of_pieces,
        }[kind]
        warps, stages = (4, 1) if kind == "sums" else (t.num_warps, t.num_stages)
        grid = (p.batch * p.kv_heads * programs,)
        return Launch(kernel, arguments, constants, grid, warps, stages)

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[SelectedPlan, Sequence[jax.Array]]:
        merged = [
            merge_leading(size, x, on, x.shape[1 if on else 0])
            for x, on in zip(arrays, batched, strict=True)
        ]
        return replace(self, problem=self.problem.folded(size)), merged
