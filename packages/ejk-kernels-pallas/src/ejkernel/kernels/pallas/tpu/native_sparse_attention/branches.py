"""The branches of native sparse attention: each attends, and pulls the gradient of its part back.

A branch gets the gradient of the full output, which is not multiplied by its gate: kernels read the
gate of every row in addition, so that all branches read the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.tpu.flash_attention.implementation import flash_attention
from ejkernel.kernels.pallas.tpu.native_sparse_attention import selected
from ejkernel.kernels.pallas.tpu.native_sparse_attention.problem import Problem
from ejkernel.ops.differentiate import Arrays, Work, same_axes
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.hidden import clear_unless
from ejkernel.types.masks.token_blocks import TokenBlocks, block_means, find_blocks, means_mask
from ejkernel.types.problems.selected_blocks import promoted_dtype


class Rows(NamedTuple):
    """Rows of a call as all branches read them.

    Attributes:
        q, k, v: ``[b, s, h, d]``, ``[b, s, hk, d]``, ``[b, s, hk, dv]`` in one dtype.
        blocks: bounds of the blocks.
        is_token: ``[1, s]``, False for padding; None: there is none.
        gates: float32 ``[b, s, h]`` by argument.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    blocks: TokenBlocks
    is_token: jax.Array | None
    gates: Mapping[str, jax.Array]

    @classmethod
    def from_call(cls, p: Any, arrays: Arrays) -> Rows:
        """Returns the rows of a call with problem ``p``; rows of padding, which may hold NaN, are
        zero."""
        blocks = find_blocks(p.query.shape[1], p.block_size, arrays.get("cu_seqlens"))
        is_token = (blocks.sequence >= 0)[None] if blocks.packed else None
        dtype = jnp.dtype(promoted_dtype(p))
        qkv = clear_unless(
            is_token, *(arrays[name].astype(dtype) for name in ("query", "key", "value"))
        )
        gates = {
            name: clear_unless(is_token, arrays[name].astype(jnp.float32))[0]
            for name in ("g_cmp", "g_slc", "g_swa")
            if name in arrays
        }
        return cls(*qkv, blocks, is_token, gates)


class OutputGradient(NamedTuple):
    """Operands of the backward pass of a branch.

    Attributes:
        base: the lse that the kernels of gradients read, from ``attend``.
        do: gradient of the full output ``[b, s, h, dv]``, which the gate does not multiply.
        delta: row sum of ``do`` times the branch's output ``[b, s, h]``.
        gate: ``[b, s, h]``; None: 1.
        dq: the sum of dq of the branches before; None: there are none.
    """

    base: jax.Array
    do: jax.Array
    delta: jax.Array
    gate: jax.Array | None
    dq: jax.Array | None

    @property
    def values(self) -> dict[str, jax.Array]:
        """The values of rows by name."""
        return {"delta": self.delta} | ({} if self.gate is None else {"gate": self.gate})


class Pulled(NamedTuple):
    """Gradients of a branch; dq is the sum of this branch's and of those before it."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


@dataclass(frozen=True)
class Flash:
    """Flash attention of all tokens over some keys.

    Attributes:
        work, arrays: of the call of flash attention.
    """

    work: Work
    arrays: Arrays

    @classmethod
    def from_rows(cls, outer: Work, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> Flash:
        """Returns the branch of a call with static part ``outer``."""
        call, scale = flash_attention.call, outer.problem.softmax_scale
        a = {"query": q, "key": k, "value": v, "mask_info": mask, "softmax_scale": scale}
        a = {**call.boundary.defaults, **a}
        problem = flash_attention.problem(a)
        cfg = {"joins_heads": True} if outer.tiles.joins_heads else None
        tiles = flash_attention.tiles(problem, outer.target, cfg)
        work = Work(flash_attention, problem, call.options(a), tiles, outer.target, outer.operation)
        operands = flash_attention.operands(a, problem)
        return cls(work, same_axes({name: x for name, x in operands.items() if x is not None}))

    def attend(self) -> tuple[jax.Array, jax.Array]:
        """Returns o ``[b, s, h, dv]``, and the lse that the kernels of gradients read."""
        (o, _), base = flash_attention.forward(self.work, self.arrays)
        return o, base

    def pull_back(self, output: OutputGradient) -> Pulled:
        """Returns the gradients of the branch."""
        values = {name: x.swapaxes(1, 2) for name, x in output.values.items()}
        arrays = self.arrays | values | {"base": output.base, "do": output.do}
        pulled = Pulled(**flash_attention.gradients(self.work, arrays))
        return pulled if output.dq is None else pulled._replace(q=pulled.q + output.dq)


@dataclass(frozen=True)
class Compressed:
    """Flash attention over the means of complete blocks.

    Attributes:
        flash: over the means. rows: of the call.
    """

    flash: Flash
    rows: Rows

    @classmethod
    def from_rows(cls, outer: Work, rows: Rows) -> Compressed:
        means = (cls._means(x, rows.blocks) for x in (rows.k, rows.v))
        mask = means_mask(rows.blocks, rows.q.shape[0])
        return cls(Flash.from_rows(outer, rows.q, *means, mask), rows)

    @staticmethod
    def _means(x: jax.Array, blocks: TokenBlocks) -> jax.Array:
        return block_means(x, blocks).astype(x.dtype)

    def attend(self) -> tuple[jax.Array, jax.Array]:
        return self.flash.attend()

    def pull_back(self, output: OutputGradient) -> Pulled:
        """Returns the gradients of the branch."""
        dq, *of_means = self.flash.pull_back(output)

        def pull_means(x: jax.Array, gradient: jax.Array) -> jax.Array:
            return jax.vjp(lambda x: self._means(x, self.rows.blocks), x)[1](gradient)[0]

        keys = (self.rows.k, self.rows.v)
        return Pulled(dq, *(pull_means(x, g) for x, g in zip(keys, of_means, strict=True)))


@dataclass(frozen=True)
class Selected:
    """Attention over the blocks of a list for each token.

    Attributes:
        work, arrays: as ``selected.attend`` takes them.
    """

    work: Work
    arrays: Arrays

    @classmethod
    def from_rows(cls, work: Work, rows: Rows, chosen: jax.Array) -> Selected:
        """Returns the branch; ``work`` has its own problem."""
        qkv = {"q": rows.q, "k": rows.k, "v": rows.v}
        return cls(work, same_axes(qkv | {"chosen": chosen, "blocks": rows.blocks}))

    def attend(self) -> tuple[jax.Array, jax.Array]:
        """Returns o and base; see ``selected.attend``."""
        return selected.attend(self.work, self.arrays)

    def pull_back(self, output: OutputGradient) -> Pulled:
        """Returns the gradients of the branch, whose kernel adds ``output.dq``."""
        operands = (output.base, output.do, output.delta, output.gate, output.dq)
        return Pulled(*selected.pull_back(self.work, self.arrays, *operands))


def branches(work: Work, rows: Rows, cu_seqlens: Any, chosen: jax.Array) -> dict[str, Any]:
    """Returns the branches of a call by the names of their gates.

    The last one adds the dq of the others in its kernel.
    """
    p, by_gate = work.problem, {}
    if "g_cmp" in rows.gates:
        by_gate["g_cmp"] = Compressed.from_rows(work, rows)
    if p.sliding_window is not None:
        mask = {"query": rows.q, "key": rows.k, "cum_seqlens_q": cu_seqlens, "causal": True}
        mask = mask_of({**mask, "sliding_window": p.sliding_window})
        by_gate["g_swa"] = Flash.from_rows(work, rows.q, rows.k, rows.v, mask)
    selected_work = replace(work, problem=Problem.from_call(p))
    return by_gate | {"g_slc": Selected.from_rows(selected_work, rows, chosen)}
