"""The choice of blocks: means in exact terms, the launches, and what needs no ranking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out, TensorMap
from ejkernel.kernels.triton.bridge import call_plan
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem, padded
from ejkernel.kernels.triton.plan import Batched, KernelPlan, bound
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.masks.token_blocks import Blocks, block_means

MOST = 129
"""Slots that a kernel ranks: the own block, and as many others as registers hold of a tile."""

SCORES = 1 << 24
"""Scores at once, in elements, where XLA ranks them."""


@dataclass(frozen=True)
class Tiles:
    """One launch: ``rows`` query heads of tokens and ``keys`` means at once, by ``programs`` for
    every batch row."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    registers: int | None = None  # of a thread, at most

    def members(self, p: Problem) -> int:
        """Heads of a group that are rows."""
        return min(power_of_two(p.group), self.rows)

    def tokens(self, p: Problem) -> int:
        return self.rows // self.members(p)


def choose(p: Problem, target: Target) -> Tiles:
    wide = padded(p.dim) > 128
    if target.hopper:
        # two programs a multiprocessor; addresses of more tokens take more registers
        registers = 128 if not wide and p.group >= 8 else None
        t = Tiles(128, 32 if wide else 64, 8, 2, 2 * target.cores, registers)
    else:
        # left to itself the compiler takes 168 registers, and spills four bytes
        registers = 255 if wide and target.platform == "cuda" else None
        t = Tiles(64, 16 if wide else 32, 4, 2, 2 * target.cores, registers)
    if p.dtype == "float32":  # queries are two operands
        t = replace(t, rows=64, num_warps=4 if target.hopper else 8, registers=None)
    if target.platform == "rocm":
        t = replace(t, num_stages=1)
    return replace(t, programs=min(t.programs, p.kv_heads * -(-p.length // t.tokens(p))))


@dataclass(frozen=True)
class SelectPlan(Batched, KernelPlan):
    """One launch: ``ranks``, or ``scores`` for XLA to rank."""

    problem: Problem
    tiles: Tiles
    kind: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of the operands, in order."""
        packed = ("firsts", "completes", "owns") if self.problem.packed else ()
        return ("q", "terms", "factors", *packed)

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What is asked for; behind it memory for a program's scores and queries."""
        p, t = self.problem, self.tiles
        lead, each = (p.batch, p.length, p.kv_heads), t.programs * terms(p.dtype)
        queries = struct("float16", p.batch, each * t.rows, padded(p.dim))
        if self.kind == "scores":
            return struct("float32", *lead, p.blocks), queries
        scores = (p.batch, t.programs * t.tokens(p), p.blocks)
        return struct("int32", *lead, p.slots), struct("float32", *scores), queries

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.native_sparse_attention import select_kernel

        p, t, ranks = self.problem, self.tiles, self.kind == "ranks"
        arguments: dict[str, Any] = dict.fromkeys(("firsts", "completes", "owns", "chosen"))
        arguments |= {name: In(i) for i, name in enumerate(self.names)}
        results = (*(["chosen"] if ranks else []), "scores", "queries")
        arguments |= {name: Out(i) for i, name in enumerate(results)}
        count = p.slots - 1 if ranks else 1
        mapped = target.platform == "cuda" and target.hopper and target.tensor_maps
        if mapped:
            rows = p.batch * p.kv_heads * (p.blocks + t.keys) * 2
            block = 2 * t.keys, padded(p.dim)
            arguments["terms"] = TensorMap(self.names.index("terms"), (rows, p.dim), block)
        arguments |= {
            "MAPPED": mapped,
            "length": p.length,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "blocks": p.blocks,
            "size": p.size,
            "slots": p.slots,
            "programs": t.programs,
            "slope": p.slope,
            "sign": p.sign,
            "D": p.dim,
            "COLUMNS": padded(p.dim),
            "GROUP": p.group,
            "MEMBERS": t.members(p),
            "SPLITS": -(-p.group // t.members(p)),
            "TOKENS": t.tokens(p),
            "KEYS": t.keys,
            "QUERY_TERMS": terms(p.dtype),
            "PER": t.num_warps,
            "SLABS": min(16, power_of_two(-(-p.blocks // 32))),
            "COUNT": count,
            "KEPT": power_of_two(-(-count // 32)),
        }
        grid = (p.batch * t.programs,)
        kernel = select_kernel.score_blocks
        options = {} if t.registers is None or not ranks else {"maxnreg": t.registers}
        return bound(kernel, arguments, grid, t.num_warps, t.num_stages, options)


def terms(dtype: str) -> int:
    """Numbers of float16 whose sum a query is."""
    return 2 if dtype == "float32" else 1


def exact_terms(means: jax.Array, more: int) -> tuple[jax.Array, jax.Array]:
    """Float32 means ``[b, n, hk, d]`` as (terms ``[b, hk, n + more, 2, d]``, factors ``[b, hk]``).

    A factor is a power of two that brings the largest mean of a head to [2^14, 2^15); the terms are
    two numbers of float16, the large one first, whose sum is the mean so brought. Of means below
    2^-17 of the largest they lose bits; ``select_kernel`` says what that does to the order.
    """
    size = jnp.max(jnp.where(jnp.isfinite(means), jnp.abs(means), 0.0), axis=(1, 3))
    exponent = jnp.clip(lax.bitcast_convert_type(size, jnp.int32) >> 23, 15, 253)
    up, down = (
        lax.bitcast_convert_type(x << 23, jnp.float32) for x in (268 - exponent, exponent - 14)
    )
    means = means * up[:, None, :, None]
    high = lax.reduce_precision(means, 5, 10)
    both = jnp.stack([high, means - high], axis=3).astype(jnp.float16)
    both = jnp.pad(both, [(0, 0), (0, more), *[(0, 0)] * 3])
    return jnp.moveaxis(both, 1, 2), down


def must_rank(p: Problem, sorts: bool) -> bool:
    """Returns whether blocks have to be ranked to know the best; ``sorts``: to know their order."""
    return sorts or p.slots < -(-p.length // p.size)


def select(
    p: Problem, target: Target, q: jax.Array, k: jax.Array, blocks: Blocks, sorts: bool
) -> jax.Array:
    """The ``p.slots`` best blocks of every token ``[b, s, hk, slots]``, -1 behind them; the best
    first if ``sorts``."""
    q, k = map(lax.stop_gradient, (q, k))
    lead = (p.batch, p.length, p.kv_heads)
    own = blocks.position // blocks.size
    own = jnp.where(blocks.sequence >= 0, own, -1)[None]
    if not must_rank(p, sorts):  # all there are
        each = jnp.arange(p.slots, dtype=jnp.int32)
        every = jnp.where(each <= own[..., None], own[..., None] - each, -1)
        return jnp.broadcast_to(every[:, :, None], (*lead, p.slots))
    if p.slots == 1:
        return jnp.broadcast_to(own[:, :, None, None], (*lead, 1))
    complete = (blocks.position + 1) // blocks.size
    means, factors = exact_terms(block_means(k, blocks), choose(p, target).keys)
    tensors = {
        "q": q,
        "terms": means,
        "factors": factors,
        "firsts": blocks.first_block[None],
        "completes": jnp.where(blocks.sequence >= 0, complete, 0)[None],
        "owns": own,
    }

    def run(kind: str, p: Problem, tensors: dict[str, jax.Array]) -> jax.Array:
        plan = SelectPlan(p, choose(p, target), kind)
        return call_plan(plan, *(tensors[name] for name in plan.names))[0]

    if p.slots <= MOST:
        return run("ranks", p, tensors)
    return _by_parts(p, tensors, lambda p, tensors: run("scores", p, tensors))


def _by_parts(p: Problem, tensors: dict[str, jax.Array], scores: Any) -> jax.Array:
    """The choice by XLA, of the scores of some tokens at a time."""
    rows = max(1, min(p.length, SCORES // (p.batch * p.kv_heads * p.blocks)))
    parts = -(-p.length // rows)
    part = replace(p, length=rows, packed=True)
    fixed = {name: tensors.pop(name) for name in ("terms", "factors")}
    number = jnp.arange(p.blocks, dtype=jnp.int32)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, (p.batch, *x.shape[1:]))
        x = jnp.pad(x, [(0, 0), (0, parts * rows - p.length), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(p.batch, parts, rows, *x.shape[2:]), 1, 0)

    def best(x: dict[str, jax.Array]) -> jax.Array:
        low, own = x["firsts"][:, :, None, None], x["owns"][:, :, None, None]
        seen = (number >= low) & (number < low + x["completes"][:, :, None, None])
        # the own block comes first, whatever the others are
        score = jnp.where(seen, jnp.nan_to_num(scores(part, x | fixed)), -jnp.inf)
        score = jnp.where((number == low + own) & (own >= 0), jnp.inf, score)
        top, found = lax.top_k(score, p.slots)
        return jnp.where(top == -jnp.inf, -1, found - low)

    chosen = lax.map(best, {name: cut(x) for name, x in tensors.items()})
    chosen = jnp.moveaxis(chosen, 0, 1)
    return chosen.reshape(p.batch, parts * rows, *chosen.shape[3:])[:, : p.length]
