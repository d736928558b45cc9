"""The sharding rule of a call: what each axis of its arrays may do on a mesh.

A rule follows from the words of the axes alone. Axes of one word are sharded alike, key heads go
where their query heads go, and an axis that no device can work on in part is never sharded. From
the rule come the factors of a Shardy rule, which let the compiler propagate shardings through a
kernel, and the layout in which the kernel runs on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ejkernel.types.arrays import is_symbolic
from ejkernel.types.calls.axes import AXES, Kind, meaning
from ejkernel.types.calls.layout import Layout, MeshAxes, Shard

Words = tuple[str, ...]
"""The word of each axis of one array, "" for an axis that stays whole."""

Factors = tuple[tuple[tuple[str, int], ...], ...]
"""The factors of each axis of one array, major first, with their sizes; "" has no other axis."""

MAPPED = "mapped_"
"""How words of axes begin that ``vmap`` added; all of them are batch-like."""

REFUSED = "refused_"
"""How words of axes begin that the compiler must not find sharded."""


@dataclass(frozen=True)
class ShardingRule:
    """The axes of one call's arrays that may be sharded, and how.

    Attributes:
        operation: its name.
        sizes: global sizes of the axis words.
        whole_groups: whether a device needs all query heads of its key heads.
        sequence: words of the axes of queries and keys where devices share a sequence.
        refused: words of axes that are an error where they are sharded, and what to do instead;
            the compiler gathers other axes that may not be sharded.
    """

    operation: str
    sizes: Mapping[str, int]
    whole_groups: bool = False
    sequence: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def words(self, words: Iterable[str], shape: Sequence[int]) -> Words:
        """Returns the words of an array's axes, "" in place of those that may not be sharded.

        Words that are refused begin with ``REFUSED``. An axis may hold several entries for each one
        of its word, all next to each other.
        """
        return tuple(self._read_word(w, size) for w, size in zip(words, shape, strict=True))

    def _read_word(self, word: str, size: int) -> str:
        word = word.lstrip("#")
        if word in self.refused:
            return REFUSED + word
        is_split = self._is_free(word) and _is_multiple(size, self.sizes.get(word))
        return word if is_split else ""

    def _is_free(self, word: str) -> bool:
        if word.startswith(MAPPED) or word in self.sequence:
            return True
        axis = meaning(word)
        # how a packed cache holds heads decides whether it can be split
        return axis.free and (axis.entries_per_head is not None or self._packs_whole_heads(word))

    def _packs_whole_heads(self, word: str) -> bool:
        return self.sizes[word] * self.sizes["packing"] == 2 * self.sizes["kv_heads"]

    @property
    def _key_heads(self) -> dict[str, int]:
        """The words of key heads in use and their sizes, ``kv_heads`` first."""
        return {w: self.sizes[w] for w in AXES if w in self.sizes and _is_of_keys(w)}

    @property
    def kv_heads(self) -> int | None:
        """Number of key heads; None: the call has no axis of them."""
        for word, size in self._key_heads.items():
            entries = meaning(word).entries_per_head
            if entries is not None:
                return size // entries
        return None

    # ---- factors for the compiler -----------------------------------------------------------

    def factors(self, words: Words, shape: Sequence[int], mesh_sizes: Mapping[str, int]) -> Factors:
        """Returns the factors of each axis of an array, for a Shardy rule.

        Query and key heads have a factor in common where every mesh axis divides the key heads;
        otherwise the compiler might split a mesh axis between groups and heads of a group.
        """
        return tuple(
            self._factors(word, size, mesh_sizes) if word and not word.startswith(REFUSED) else ()
            for word, size in zip(words, shape, strict=True)
        )

    def _factors(
        self, word: str, size: int, mesh_sizes: Mapping[str, int]
    ) -> tuple[tuple[str, int], ...]:
        kv_heads, count = self.kv_heads, self.sizes.get(word, size)
        name, minor = word, ""
        if kv_heads is not None and (word == "heads" or _is_of_keys(word)):
            parts = [n for n in mesh_sizes.values() if n > 1]
            if count % kv_heads == 0 and all(kv_heads % n == 0 for n in parts):
                name, count, minor = "kv_heads", kv_heads, "group" if word == "heads" else ""
        return ((name, count), *([(minor, size // count)] if size > count else []))

    # ---- how it runs ------------------------------------------------------------------------

    def layout(
        self,
        mesh_sizes: Mapping[str, int],
        arrays: Iterable[tuple[Words, Sequence[MeshAxes]]],
    ) -> Layout:
        """Returns the layout that follows from how arrays are sharded; the first of a word counts.

        ``arrays``: the words and the mesh axes of each array's axes, in order. A word keeps as
        many of its mesh axes, major first, as divide it evenly.

        Raises:
            ValueError: an axis is sharded that is ``refused``.
        """
        layout = Layout(self.operation, mesh_sizes, frozenset(self.sizes))
        used: set[str] = set()
        for words, entries in arrays:
            for word, axes in zip(words, entries, strict=True):
                if word.startswith(REFUSED):
                    self._check_whole(word.removeprefix(REFUSED), axes, mesh_sizes)
                    continue
                chosen = "heads" if word and _is_of_keys(word) else word
                if not word or chosen in layout.spread:
                    continue
                axes = tuple(a for a in axes if a not in used and mesh_sizes[a] > 1)
                if word in self.sequence:
                    axes = self._spread_sequence(layout, word, axes)
                elif chosen == "heads":
                    axes = self._spread_heads(layout, word, axes)
                else:
                    axes = _dividing(axes, mesh_sizes, (self.sizes[word],))
                if axes:
                    layout.spread[chosen] = axes
                    used.update(axes)
        return layout

    def _check_whole(self, word: str, axes: MeshAxes, mesh_sizes: Mapping[str, int]) -> None:
        """Raises ValueError for an axis that is sharded."""
        if any(mesh_sizes[axis] > 1 for axis in axes):
            role = "a sequence that no device can share" if meaning(word).in_order else "indexed"
            raise ValueError(
                f"{self.operation}: axis {word} is sharded over {axes}, but is {role}, so that "
                f"every device needs all of it; {self.refused[word]}"
            )

    def _spread_sequence(self, layout: Layout, word: str, axes: MeshAxes) -> MeshAxes:
        """Returns the mesh axes of queries, after spreading keys over them; keys follow queries."""
        if word != self.sequence[0]:
            return ()
        counts = [self.sizes[w] for w in self.sequence if w in self.sizes]
        axes = _dividing(layout.in_mesh_order(axes), layout.mesh_sizes, counts)
        if axes:
            layout.spread.update(dict.fromkeys(self.sequence, axes))
        return axes

    def _spread_heads(self, layout: Layout, word: str, axes: MeshAxes) -> MeshAxes:
        """Returns the mesh axes of query heads, after spreading key heads with them."""
        keys, sizes = self._key_heads, layout.mesh_sizes
        counts = [n for n in (self.sizes.get("heads"), self.kv_heads) if n is not None]
        if word == "heads":
            axes = _dividing(axes, sizes, counts[:1])
        shared = _dividing(axes, sizes, counts)
        # entries of packed key heads divide where both their number and that of the heads do
        shared = _dividing(shared, sizes, [n for w, n in keys.items() if w == "packed_kv_heads"])
        if self.whole_groups or word != "heads":
            axes = shared
        if shared:
            layout.spread.update(dict.fromkeys(keys, shared))
        return axes

    def shard(self, layout: Layout) -> Shard:
        """Returns one shard of a call in this layout."""
        return Shard(layout, self.sizes)


def _is_of_keys(word: str) -> bool:
    return word in AXES and AXES[word].kind is Kind.KEY_HEADS


def _is_multiple(size: int, count: Any) -> bool:
    """Returns whether an axis holds the same number of entries for each of ``count``."""
    if is_symbolic(size) or is_symbolic(count):
        return False
    return bool(count) and count > 1 and size % count == 0 and size > 0


def _dividing(axes: MeshAxes, mesh_sizes: Mapping[str, int], counts: Sequence[int]) -> MeshAxes:
    """Returns the longest start of ``axes`` whose devices divide all counts."""
    while axes:
        parts = math.prod(mesh_sizes[a] for a in axes)
        if all(count % parts == 0 for count in counts):
            return axes
        axes = axes[:-1]
    return ()
