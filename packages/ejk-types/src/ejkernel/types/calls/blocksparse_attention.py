"""The call of blocksparse_attention."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.types.arrays import is_symbolic
from ejkernel.types.attention.problem import Problem
from ejkernel.types.calls import canonicalize
from ejkernel.types.calls.layout import Layout
from ejkernel.types.calls.sharding_notes import over_note
from ejkernel.types.calls.softmax import SoftmaxCall
from ejkernel.types.calls.spec import Arguments
from ejkernel.types.calls.words import Array, AttentionMask, B, F, I, Key, invalid
from ejkernel.types.masks.fields import has_positions
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.query_slice import slice_queries


class BlockSparseAttention(SoftmaxCall):
    """Attention over the blocks a pattern allows.

    A kernel also gets the pattern, bool ``[#b, #h, q blocks, kv blocks]``, where there is one.
    """

    name = "blocksparse_attention"
    seeds = ("dropout_seed",)
    sequence_axes = ("q_len",)
    shares_queries = True
    merged: ClassVar[Mapping[str, str]] = {**SoftmaxCall.merged, "mask_builder": "block_mask"}

    @staticmethod
    def signature(
        query: F[Array, "batch q_len heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
        *,
        block_mask: B[Array, "#batch #heads q_blocks kv_blocks"]
        | B[Array, "q_blocks kv_blocks"]
        | None = None,
        mask_builder: Callable[[int, int, int], Array] | None = None,
        q_block_size: int = 128,
        kv_block_size: int = 128,
        mask_info: MaskInfo | None = None,
        attention_mask: AttentionMask | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        chunk_size: int | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
        return_lse: bool = False,
    ) -> None: ...

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        """``mask_builder(q_len, kv_len, heads)`` makes the block mask.

        In a trace it is a numpy array where it depends on nothing that is traced.
        """
        super().check_values(a)
        builder = a["mask_builder"]
        if builder is None:
            return
        if a["block_mask"] is not None:
            raise ValueError(
                "mask_builder: given together with block_mask, expected only one of them"
            )
        if not callable(builder):
            raise invalid("mask_builder", "a callable (q_len, kv_len, heads), or None", builder)
        shapes: list[tuple[int, ...]] = [getattr(a[n], "shape", ()) for n in ("query", "key")]
        if any(len(shape) != 4 for shape in shapes):
            return  # the type check has more to say
        cls.check_axes(a)
        symbolic = any(is_symbolic(n) for n in shapes[0] + shapes[1])
        with nullcontext() if symbolic else jax.ensure_compile_time_eval():
            mask = builder(shapes[0][1], shapes[1][1], shapes[0][2])
        traced = isinstance(a["query"], Tracer)
        if traced and isinstance(mask, jax.Array) and not isinstance(mask, Tracer):
            mask = np.asarray(mask)
        a.update(block_mask=mask, mask_builder=None)

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """A block mask ``[1 or batch, 1 or heads, q_blocks, kv_blocks]``."""
        for name in ("q_block_size", "kv_block_size"):
            canonicalize.positive(a, name)
        super().canonicalize(a)
        mask = a["block_mask"]
        if mask is None:
            return
        q_size, kv_size = a["q_block_size"], a["kv_block_size"]
        blocks = (-(-a["query"].shape[1] // q_size), -(-a["key"].shape[1] // kv_size))
        if mask.shape[-2:] != blocks:
            legal = f"bool[.., {blocks[0]}, {blocks[1]}]: blocks of {q_size} query rows and "
            raise invalid("block_mask", f"{legal}{kv_size} keys", mask)
        a["block_mask"] = mask[None, None] if mask.ndim == 2 else mask

    @classmethod
    def problem(cls, a: Mapping[str, Any]) -> Problem:
        blocks = None if a["block_mask"] is None else (a["q_block_size"], a["kv_block_size"])
        return replace(super().problem(a), pattern_blocks=blocks)

    @classmethod
    def operands(cls, a: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        return super().operands(a, problem) | {"pattern": a["block_mask"]}

    @classmethod
    def shares_sequence(cls, a: Mapping[str, Any]) -> bool:
        """Returns whether devices may share the queries of a call.

        Their indices become positions, of which kernels take one set.
        """
        mask = a["mask_info"]
        return mask is None or not any(map(has_positions, mask.terms))

    @classmethod
    def sequence_note(cls, a: Mapping[str, Any], layout: Layout) -> str:
        over = over_note(layout, cls.sequence_axes)
        return f"queries {over}: each device attends to all keys with its own"

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None:
        super().to_shard(a, shard)
        if shard.parts("q_len") == 1:
            return
        first, length = shard.offset("q_len"), shard.local("q_len")
        for name in cls.seeds:
            if a[name] is not None:
                a[name] = jnp.concatenate([a[name], jnp.stack([first, jnp.int32(0)])])
        if a["mask_info"] is not None:
            a["mask_info"] = slice_queries(a["mask_info"], first, length, a["key"].shape[1])
        pattern, size = a["block_mask"], a["q_block_size"]
        if pattern is None:
            return
        block = math.gcd(size, length)
        if block < size:  # a block lies on several devices
            pattern, a["q_block_size"] = jnp.repeat(pattern, size // block, axis=2), block
        rows = first // block, length // block
        a["block_mask"] = jax.lax.dynamic_slice_in_dim(pattern, *rows, axis=2)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """A pattern that shows a few blocks."""
        pattern = a["block_mask"]
        return {} if pattern is None else {"block_mask": rng.random(pattern.shape) < 0.2}
