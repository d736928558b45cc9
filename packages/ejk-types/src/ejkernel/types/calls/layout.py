"""Layouts of calls: the mesh axes that each axis word is sharded over, and one shard of a call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel.types.calls.axes import AXES, Kind, bare, meaning

MeshAxes = tuple[str, ...]


@dataclass
class Layout:
    """The mesh axes that every word is spread over.

    Attributes:
        operation: name for messages.
        mesh_sizes: mesh axis -> size.
        legal: words that may be spread.
        spread: word -> mesh axes.
        source: what says how words are spread, for messages.
        sequence_hint: what to do in place of sharding a sequence, for messages.
    """

    operation: str
    mesh_sizes: Mapping[str, int]
    legal: frozenset[str]
    spread: dict[str, MeshAxes] = field(default_factory=dict)
    source: str = "in_specs"
    sequence_hint: str = "use ring_attention to shard a sequence"

    def axes(self, word: str) -> MeshAxes:
        return self.spread.get(word.lstrip("#"), ())

    def parts(self, word: str) -> int:
        """Over how many devices the word is spread."""
        return math.prod(self.mesh_sizes[a] for a in self.axes(word))

    def in_mesh_order(self, axes: MeshAxes) -> MeshAxes:
        """Returns the longest start of mesh axes that has the order of the mesh.

        JAX counts the devices of several mesh axes in that order where they send each other arrays.
        """
        order = list(self.mesh_sizes)
        places = [order.index(axis) for axis in axes]
        ordered = (n for n in range(len(axes), 0, -1) if places[:n] == sorted(places[:n]))
        return axes[: next(ordered, 0)]

    @property
    def summed_axes(self) -> frozenset[str]:
        """The mesh axes over which the devices' results of a call are terms of a sum."""
        summed = [w for w in self.spread if bare(w) in AXES and AXES[bare(w)].is_summed]
        return frozenset(axis for word in summed for axis in self.spread[word])

    def spec(self, words: Sequence[str], shape: Sequence[int] | None = None) -> PartitionSpec:
        """The spec of an array with these axes; axes of size 1 stay whole."""
        entries: list[Any] = []
        for i, word in enumerate(words):
            axes = self.axes(word)
            if not axes or (shape is not None and shape[i] == 1):
                entries.append(None)
            else:
                entries.append(axes if len(axes) > 1 else axes[0])
        return PartitionSpec(*entries)


@dataclass(frozen=True)
class Shard:
    """The position of one shard; valid inside the mapped function only.

    Attributes:
        layout: which mesh axes every axis word is spread over.
        sizes: global sizes of the axis words.
    """

    layout: Layout
    sizes: Mapping[str, int]

    def index(self, word: str) -> jax.Array:
        """Number of this shard along the word, 0 when it is whole."""
        number = jnp.int32(0)
        for axis in self.layout.axes(word):
            number = number * self.layout.mesh_sizes[axis] + jax.lax.axis_index(axis)
        return number.astype(jnp.int32)

    def parts(self, word: str) -> int:
        """Over how many devices the word is spread."""
        return self.layout.parts(word)

    def local(self, word: str) -> int:
        """Size of the word on this shard."""
        return self.sizes[word] // self.parts(word)

    def offset(self, word: str) -> jax.Array:
        """Global index of this shard's first entry along the word."""
        return self.index(word) * self.local(word)

    def pick_key_heads(self, a: dict[str, Any], words: Mapping[str, Sequence[str]]) -> None:
        """Keeps, of the key heads on this shard, those that its query heads read.

        Query heads of one shard may belong to one group, to whole groups, or lie across groups; in
        the last case every query head gets its own copy of its key head. ``words``: the words of
        the axes of every array of ``a`` that may have key heads.
        """
        for name, axes in words.items():
            at = next((i for i, w in enumerate(axes) if meaning(w).kind is Kind.KEY_HEADS), None)
            if at is None:
                continue
            width = meaning(axes[at]).entries_per_head or 1
            heads, present = self.local("heads"), a[name].shape[at] // width
            group = self.sizes["heads"] // (present * self.parts(axes[at]))
            if heads == present * group:
                continue
            before = self.index(axes[at]) * present
            first = self.offset("heads") // group - before
            if group % heads == 0 or heads % group == 0:
                count = max(heads // group, 1)
                a[name] = jax.lax.dynamic_slice_in_dim(a[name], first * width, count * width, at)
                continue
            picked = (self.offset("heads") + jnp.arange(heads)) // group - before
            index = (picked[:, None] * width + jnp.arange(width)[None]).reshape(-1)
            a[name] = jnp.take(a[name], index, axis=at)
