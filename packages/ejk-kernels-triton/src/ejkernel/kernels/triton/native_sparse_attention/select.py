"""The choice of blocks: means in exact terms, the launches, and what needs no ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.triton.bridge import call, merge_leading
from ejkernel.kernels.triton.launch import In, Launch, Out, power_of_two
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem
from ejkernel.kernels.triton.native_sparse_attention.tiles import padded
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.token_blocks import Blocks, block_means

MOST = 65
"""Slots that a kernel ranks: the own block, and as many others as registers hold of a tile."""

SCORES = 1 << 24
"""Scores at once, in elements, where XLA ranks them."""


@dataclass(frozen=True)
class Tiles:
    """Of both launches: ``rows`` tokens, ``keys`` means."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose(p: Problem, target: Target, *, ranks: bool) -> Tiles:
    """The tiles of the lse, or of the ranking, which has the best so far in registers too."""
    columns = padded(p.dim)
    wide = columns > 128
    if p.dtype == "float32":
        # products without matrix instructions: small tiles keep operands in registers
        return Tiles(16, 16 if wide else 32, 8, 1)
    if target.platform == "rocm":
        return Tiles(32, 16 if wide else 32, 4, 1)
    if not ranks:
        return Tiles(128, 32 if wide else 64, 8, 2) if target.hopper else Tiles(64, 32, 4, 2)
    # queries are operands in registers, beside scores and the best so far; two terms of float16
    # queries leave room for 16 rows, and of 256 columns spill a little even so
    if p.dtype == "float16":
        return Tiles(16, 16 if wide else 32, 4, 2)
    rows = 64 if columns <= (128 if target.hopper else 64) and p.slots <= 33 else 32
    keys = 64 if columns <= 64 and target.hopper else 32
    return Tiles(rows, keys if target.hopper or not wide else 16, 4, 2)


@dataclass(frozen=True)
class SelectPlan:
    """One launch: ``lse`` of the means' logits, then ``ranks``, or ``scores`` for XLA to rank."""

    problem: Problem
    tiles: Tiles
    kind: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of the operands, in order."""
        ranks, packed = self.kind == "ranks", self.problem.packed
        names = ("q", "means", *(["base", "rest"] if self.kind != "lse" else []))
        return (*names, *(["firsts", "completes", *(["owns"] if ranks else [])] if packed else []))

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        if self.kind == "lse":
            row = jax.ShapeDtypeStruct((p.batch, p.length, p.heads), jnp.dtype("float32"))
            return row, row
        each, dtype = (p.slots, "int32") if self.kind == "ranks" else (p.blocks, "float32")
        shape = (p.batch, p.length, p.kv_heads, each)
        return (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),)

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.native_sparse_attention import select_kernel

        p, t, ranks = self.problem, self.tiles, self.kind == "ranks"
        arguments: dict[str, Any] = dict.fromkeys(("firsts", "completes"))
        if ranks:
            arguments["owns"] = None
        arguments |= {name: In(i) for i, name in enumerate(self.names)}
        results = {"lse": ("base", "rest"), "ranks": ("chosen",), "scores": ("scores",)}[self.kind]
        arguments |= {name: Out(i) for i, name in enumerate(results)}
        arguments |= {
            "length": p.length,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "blocks": p.blocks,
            "size": p.size,
            "slope": p.slope,
            "sign": p.sign,
        }
        constants = {
            "D": p.dim,
            "COLUMNS": padded(p.dim),
            "GROUP": p.group,
            "ROWS": t.rows,
            "KEYS": t.keys,
            "PIECES": terms(p.dtype),
        }
        if ranks:
            arguments["slots"] = p.slots
            constants |= {"COUNT": p.slots - 1, "KEEP": power_of_two(p.slots - 1)}
        kernel = {
            "lse": select_kernel.means_lse,
            "ranks": select_kernel.select_best,
            "scores": select_kernel.mean_scores,
        }[self.kind]
        heads = p.heads if self.kind == "lse" else p.kv_heads
        programs = p.batch * heads * -(-p.length // t.rows)
        return Launch(kernel, arguments, constants, (programs,), t.num_warps, t.num_stages)

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[SelectPlan, Sequence[jax.Array]]:
        merged = [
            merge_leading(size, x, on, x.shape[1 if on else 0])
            for x, on in zip(arrays, batched, strict=True)
        ]
        return replace(self, problem=self.problem.folded(size)), merged


def terms(dtype: str) -> int:
    """Numbers whose sum a mean is."""
    return 1 if dtype == "float32" else 3


def exact_terms(means: jax.Array, dtype: str) -> jax.Array:
    """Float32 means ``[b, n, hk, d]`` as ``[b, n, hk, terms * d]``, large terms first.

    Three of bfloat16 hold all 24 bits; float16 queries are two of them, bfloat16 queries one.
    """
    if terms(dtype) == 1:
        return means
    high = lax.reduce_precision(means, 8, 7)
    middle = lax.reduce_precision(means - high, 8, 7)
    low = lax.reduce_precision(means - high - middle, 8, 7)
    return jnp.concatenate([high, middle, low], axis=-1).astype(jnp.bfloat16)


def must_rank(p: Problem, sorts: bool) -> bool:
    """Whether blocks have to be ranked to know the best; ``sorts``: to know their order."""
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
        every = jnp.where(each <= own[..., None], each, -1)
        return jnp.broadcast_to(every[:, :, None], (*lead, p.slots))
    if p.slots == 1:
        return jnp.broadcast_to(own[:, :, None, None], (*lead, 1))
    complete = (blocks.position + 1) // blocks.size
    tensors = {
        "q": q,
        "means": exact_terms(block_means(k, blocks), p.dtype),
        "firsts": blocks.first_block[None],
        "completes": jnp.where(blocks.sequence >= 0, complete, 0)[None],
        "owns": own,
    }

    def run(kind: str, p: Problem, tensors: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        plan = SelectPlan(p, choose(p, target, ranks=kind != "lse"), kind)
        return call(plan, *(tensors[name] for name in plan.names))

    tensors["base"], tensors["rest"] = run("lse", p, tensors)
    if p.slots <= MOST:
        return run("ranks", p, tensors)[0]
    return _by_parts(p, tensors, lambda p, tensors: run("scores", p, tensors)[0])


def _by_parts(p: Problem, tensors: dict[str, jax.Array], scores: Any) -> jax.Array:
    """The choice by XLA, of the scores of some tokens at a time."""
    rows = max(1, min(p.length, SCORES // (p.batch * p.kv_heads * p.blocks)))
    parts = -(-p.length // rows)
    part = replace(p, length=rows, packed=True)
    fixed = {"means": tensors.pop("means")}
    number = jnp.arange(p.blocks, dtype=jnp.int32)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, (p.batch, *x.shape[1:]))
        x = jnp.pad(x, [(0, 0), (0, parts * rows - p.length), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(p.batch, parts, rows, *x.shape[2:]), 1, 0)

    def best(x: dict[str, jax.Array]) -> jax.Array:
        low, own = x["firsts"][:, :, None, None], x["owns"][:, :, None, None]
        seen = (number >= low) & (number < low + x["completes"][:, :, None, None])
        score = jnp.where(seen, scores(part, x | fixed), -jnp.inf)
        score = jnp.where((number == low + own) & (own >= 0), jnp.inf, score)
        top, found = lax.top_k(score, p.slots)
        return jnp.where(top == -jnp.inf, -1, found - low)

    chosen = lax.map(best, {name: cut(x) for name, x in tensors.items()})
    chosen = jnp.moveaxis(chosen, 0, 1)
    return chosen.reshape(p.batch, parts * rows, *chosen.shape[3:])[:, : p.length]
