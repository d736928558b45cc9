"""The call of mean_pooling."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import as_bool, at_most
from ejkernel.types.calls import canonicalize
from ejkernel.types.calls.axes import bare
from ejkernel.types.calls.layout import Layout
from ejkernel.types.calls.sharding import ShardingRule
from ejkernel.types.calls.sharding_notes import over_note, size_note
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, Flags, I, invalid
from ejkernel.types.states.line import Line
from ejkernel.types.states.pooling import pool_over_devices


class MeanPooling(Call):
    """Means over sequences, packed sequences or chunks of them."""

    name = "mean_pooling"
    sequence_axes = ("seq", "tokens")
    passes_states = True

    @staticmethod
    def signature(
        x: F[Array, "batch seq *channels"] | F[Array, " tokens *channels"],
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        chunk_size: int | None = None,
        attention_mask: Flags[Array, "batch seq"] | Flags[Array, " tokens"] | None = None,
    ) -> None: ...

    @classmethod
    def argument_axes(cls, a: Arguments) -> dict[str, str]:
        return {"x": "batch seq *channels" if a["cu_seqlens"] is None else "tokens *channels"}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        group = "batch" if a["cu_seqlens"] is None else "sequences"
        return (group + (" *channels" if a["chunk_size"] is None else " chunks *channels"),)

    @classmethod
    def forward_axes(cls, a: Arguments, count: int) -> tuple[str, ...]:
        return (("batch" if a["cu_seqlens"] is None else "sequences") + " channels_0",)

    @classmethod
    def sharding_rule(cls, a: Mapping[str, Any], *, sequence: bool = False) -> ShardingRule:
        """Returns a rule without channel axes but the first: a kernel merges all of them."""
        rule = super().sharding_rule(a, sequence=sequence)
        sizes = {w: n for w, n in rule.sizes.items() if bare(w) != "channels" or w == "channels_0"}
        return replace(rule, sizes=sizes)

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """Token axis, chunk size and mask agree."""
        x, mask, packed = a["x"], a["attention_mask"], a["cu_seqlens"] is not None
        axis = 0 if packed else 1
        if x.ndim < axis + 2:
            form = "float[tokens, *channels]" if packed else "float[batch, seq, *channels]"
            raise invalid("x", f"{form} with at least one channel axis", x)
        canonicalize.at_least_one(a, "cu_seqlens")
        canonicalize.positive(a, "chunk_size", "an integer >= 1, or None")
        if a["chunk_size"] is not None:
            a["chunk_size"] = max(at_most(a["chunk_size"], x.shape[axis]), 1)
        if mask is not None:
            if mask.shape != x.shape[: axis + 1]:
                raise invalid("attention_mask", f"bool or int{list(x.shape[: axis + 1])}", mask)
            a["attention_mask"] = as_bool(mask)

    @classmethod
    def sequence_note(cls, a: Mapping[str, Any], layout: Layout) -> str:
        shape = cls._shapes(a)[0]
        batch = "batch" if a["cu_seqlens"] is None else "sequences"
        axis = 1 if a["chunk_size"] is None else 2
        words = (batch, *("chunks",) * (axis - 1), "channels_0", *("_",) * (len(shape) - axis - 1))
        size = size_note({words: jax.ShapeDtypeStruct(shape, jnp.float32)}, layout)
        return f"sums {over_note(layout, cls.sequence_axes)}: all-reduce of {size}"

    @classmethod
    def share_sequence(
        cls, a: Arguments, shard: Any, run: Callable[[Arguments], Any]
    ) -> tuple[Any, ...]:
        word = "seq" if a["cu_seqlens"] is None else "tokens"
        return (pool_over_devices(a, Line.of_shard(shard, word), run),)

    @classmethod
    def _shapes(cls, a: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of the means, and of x as ``[batch, rows, channels]``."""
        x, cu, chunk = a["x"], a["cu_seqlens"], a["chunk_size"]
        batch, rows, *channels = x.shape if cu is None else (1, *x.shape)
        groups = batch if cu is None else cu.shape[0] - 1
        per_group = () if chunk is None else (-(-rows // chunk),)
        return (groups, *per_group, *channels), (batch, rows, math.prod(channels))

    @classmethod
    def operands(cls, a: Mapping[str, Any], problem: Any) -> dict[str, Any]:
        """x ``[batch, rows, channels]``, cu_seqlens, and kept int8 ``[batch, rows]``."""
        shape, mask = cls._shapes(a)[1], a["attention_mask"]
        mask = None if mask is None else mask.reshape(shape[:2]).astype(jnp.int8)
        return {"x": a["x"].reshape(shape), "cu_seqlens": a["cu_seqlens"], "kept": mask}

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Means over nothing are 0."""
        out, rows = cls._shapes(a)
        return (jnp.zeros(out, a["x"].dtype),) if 0 in (*out, *rows) else None

    @classmethod
    def results(cls, a: Mapping[str, Any], outputs: tuple[Any, ...]) -> Any:
        return outputs[0].reshape(cls._shapes(a)[0])
