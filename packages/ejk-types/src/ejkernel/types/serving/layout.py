"""KVLayout: where the keys and values of a token lie in a cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVLayout:
    """Memory layout of one token in a cache ``[pages, page_size, ...]``, counted in elements.

    Attributes:
        heads: heads that a token has in memory. Packed caches have some that are never used.
        key_stride: distance from the key of a head to the key of the next head.
        value_stride: the same distance for values.
        value_offset: distance from a key to its value in the same array. None: values have an
            array of their own.
    """

    heads: int
    key_stride: int
    value_stride: int
    value_offset: int | None = None

    @classmethod
    def separate(cls, heads: int, dim: int, value_dim: int) -> KVLayout:
        """Returns the layout of two arrays, one of keys and one of values."""
        return cls(heads, dim, value_dim)

    @classmethod
    def interleaved(cls, heads: int, width: int) -> KVLayout:
        """Returns the layout of one array that interleaves the key and the value of each head.

        ``width`` is the number of elements of a key in memory, at least the head dim.
        """
        return cls(heads, 2 * width, 2 * width, width)

    @classmethod
    def latent(cls, dim: int) -> KVLayout:
        """Returns the layout of latent rows of ``dim``, whose first columns are their values."""
        return cls(1, dim, dim, 0)

    @property
    def is_latent(self) -> bool:
        """Returns whether the first columns of a key are its value."""
        return self.value_offset == 0
