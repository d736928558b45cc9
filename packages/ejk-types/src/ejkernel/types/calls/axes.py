"""The meanings of axes: the one table of the words that signatures are written in.

The word of an axis decides whether calls that differ in it share a tuned config, and whether it may
be spread over a mesh. A word that is not here is an error where a call is defined.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from ejkernel.types.masks.fields import ARRAYS


class Kind(enum.Enum):
    """The kind of thing that an axis counts."""

    BATCH = "independent problems"
    HEADS = "query heads"
    KEY_HEADS = "key heads, which go where their query heads go"
    TOKENS = "places of a sequence, which no device can work on without the others"
    COUNT = "how much there is of something, from call to call another number"
    ROWS = "independent rows, from call to call another number"
    TERMS = "independent problems of which each row of the result has one, others add 0"
    COLUMNS = "features that are computed apart from each other"
    FEATURE = "a size of the model"


@dataclass(frozen=True)
class Axis:
    """The meaning of one word.

    Attributes:
        kind: what the axis counts.
        entries_per_head: of key heads: entries a head, None where a cache's packing decides.
    """

    kind: Kind
    entries_per_head: int | None = 1

    @property
    def varies(self) -> bool:
        """Returns whether its size changes from call to call, so that keys hold buckets."""
        return self.kind in (Kind.BATCH, Kind.TOKENS, Kind.COUNT, Kind.ROWS)

    @property
    def in_order(self) -> bool:
        """Returns whether softmax, scans and loops over pages forbid splitting along it."""
        return self.kind is Kind.TOKENS

    @property
    def free(self) -> bool:
        """Returns whether it may be spread over a mesh."""
        return self.kind not in (Kind.TOKENS, Kind.COUNT, Kind.FEATURE)

    @property
    def is_summed(self) -> bool:
        """Returns whether devices that share out its entries have results to be added up."""
        return self.kind is Kind.TERMS


def _all(kind: Kind, words: str) -> dict[str, Axis]:
    return dict.fromkeys(words.split(), Axis(kind))


AXES: dict[str, Axis] = {
    **_all(Kind.BATCH, "batch"),
    **_all(Kind.HEADS, "heads"),
    "kv_heads": Axis(Kind.KEY_HEADS),
    "combined_kv_heads": Axis(Kind.KEY_HEADS, 2),
    "packed_kv_heads": Axis(Kind.KEY_HEADS, None),
    **_all(Kind.TOKENS, "q_len kv_len kv_total seq tokens"),
    # of packed sequences, of a cache, of a block mask
    **_all(Kind.COUNT, "sequences sequences_plus_1 states chunks"),
    **_all(Kind.COUNT, "pages max_blocks table_entries max_new"),
    **_all(Kind.COUNT, "q_blocks kv_blocks"),
    # of a grouped matmul, of a mean
    **_all(Kind.ROWS, "rows"),
    **_all(Kind.TERMS, "groups"),
    **_all(Kind.COLUMNS, "columns channels"),
    **_all(Kind.FEATURE, "head_dim v_dim key_dim q_dim nope_dim rope_dim latent latent_dim"),
    **_all(Kind.FEATURE, "cache_dim padded_head_dim packing page_size sinks selected"),
    **_all(Kind.FEATURE, "all_groups inner"),
    # of a convolution over tokens: taps, and the tokens before the present one
    **_all(Kind.FEATURE, "width history"),
}

_UNNAMED = Axis(Kind.FEATURE)
_NUMBERED = re.compile(r"_\d+$")


def bare(word: str) -> str:
    """A word of a signature without its marks: ``batch`` of ``#batch``, ``channels`` of
    ``*channels`` and of ``channels_0``."""
    name = word.lstrip("#*")
    return name if name in AXES else _NUMBERED.sub("", name)


def meaning(word: str) -> Axis:
    """Returns the meaning of a word of a signature.

    ``_`` and integers stand for axes without a name.

    Raises:
        ValueError: the word is not in the table.
    """
    axis = AXES.get(word)
    if axis is not None:
        return axis
    name = bare(word)
    if name == "_" or name.isdigit():
        return _UNNAMED
    axis = AXES.get(name)
    if axis is None:
        raise ValueError(f"axis word {name!r} is unknown, known are: {', '.join(AXES)}")
    return axis


def mask_axes(x: Any) -> tuple[str, ...]:
    """Returns the words of an array of a MaskInfo: a dense mask, or values per (head and) token."""
    if len(x.shape) == 4:  # its key axis stays full also where a ring splits the keys themselves
        return ("batch", "heads", "q_len", "kv_total")
    return ("batch", *("heads",) * (len(x.shape) - 2), "q_len")


def mask_words(mask: Any) -> list[tuple[str, ...]]:
    """Returns the words of every array of a mask, in the order in which JAX flattens it."""
    words: list[tuple[str, ...]] = []
    for term in mask.terms:
        for name in ARRAYS:
            x = getattr(term, name)
            if x is not None:
                axes = mask_axes(x)
                words.append((*axes[:-1], "kv_len") if name.startswith("kv") else axes)
    return words
