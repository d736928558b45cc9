"""The static structural rule: causal, window and chunk as one band of key positions.

A query at position p sees exactly the key positions of an interval [lo(p), hi(p)]:

    causal          hi = p + offset
    window (l, r)   lo = p + offset - l,  hi = p + offset + r
    chunk c         lo = ((p + offset) // c) * c,  hi = lo + c - 1

Several constraints take the largest lo and the smallest hi. Both ends never decrease with p, and
p + offset is always inside, so the keys seen by consecutive queries form one interval: block
ranges need only the first and the last query of a block.

Everything here works on Python ints, numpy arrays and traced arrays alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import static_int
from ejkernel.types.errors import invalid

# Positions are int32: distances beyond this bound can never matter, and clamping to it keeps
# position + distance from overflowing.
MAX_DISTANCE = 2**30


def _pick(a: Any, b: Any, largest: bool) -> Any:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b) if largest else min(a, b)
    xp = jnp if isinstance(a, jax.Array) or isinstance(b, jax.Array) else np
    return xp.maximum(a, b) if largest else xp.minimum(a, b)


def largest(a: Any, b: Any) -> Any:
    """Elementwise maximum; None is no bound."""
    return _pick(a, b, True)


def smallest(a: Any, b: Any) -> Any:
    """Elementwise minimum; None is no bound."""
    return _pick(a, b, False)


def _clamp(distance: int) -> int:
    return max(-MAX_DISTANCE, min(MAX_DISTANCE, distance))


def shifted(position: Any, distance: int) -> Any:
    """Returns ``position + distance``, saturated where the dtype is int32.

    A bound past an end is that end, so a position of exactly -2**31 or 2**31 - 1 may pass it.
    """
    if isinstance(position, int) or position.dtype.itemsize > 4:
        return position + distance
    if distance > 0:
        position = smallest(position, 2**31 - 1 - distance)
    elif distance < 0:
        position = largest(position, -(2**31) - distance)
    return position + distance


def window_tuple(window: Any, argument: str = "sliding_window") -> tuple[int, int] | None:
    """``(left, right)`` of an int or a pair; negative -> ValueError."""
    if window is None:
        return None
    pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2:
        raise invalid(argument, "an int or a tuple (left, right)", window)
    left, right = (static_int(w, argument, low=0) for w in pair)
    return left, right


@dataclass(frozen=True)
class Rule:
    """Causal, window and chunk with one common offset. Static and hashable."""

    causal: bool = False
    offset: int = 0
    window: tuple[int, int] | None = None
    chunk: int | None = None

    @property
    def trivial(self) -> bool:
        """True if every pair is visible."""
        return not self.causal and self.window is None and self.chunk is None

    @property
    def low_distance(self) -> int | None:
        """Least visible k - q by causal and window alone; None = no bound."""
        return None if self.window is None else _clamp(self.offset - self.window[0])

    @property
    def high_distance(self) -> int | None:
        """Largest visible k - q by causal and window alone; None = no bound."""
        if self.causal:
            return _clamp(self.offset)
        return None if self.window is None else _clamp(self.offset + self.window[1])

    def key_bounds(self, p: Any) -> tuple[Any, Any]:
        """Inclusive (lo, hi) of the key positions that query position ``p`` sees; None = open."""
        lo = None if self.low_distance is None else shifted(p, self.low_distance)
        hi = None if self.high_distance is None else shifted(p, self.high_distance)
        if self.chunk is not None:
            chunk = min(self.chunk, MAX_DISTANCE)
            start = shifted(p, _clamp(self.offset)) // chunk * chunk
            lo, hi = largest(lo, start), smallest(hi, shifted(start, chunk - 1))
        return lo, hi

    def query_bounds(self, r: Any) -> tuple[Any, Any]:
        """Inclusive (lo, hi) of the query positions that see key position ``r``; None = open."""
        lo = None if self.high_distance is None else shifted(r, -self.high_distance)
        hi = None if self.low_distance is None else shifted(r, -self.low_distance)
        if self.chunk is not None:
            chunk = min(self.chunk, MAX_DISTANCE)
            start = shifted(r // chunk * chunk, -_clamp(self.offset))
            lo, hi = largest(lo, start), smallest(hi, shifted(start, chunk - 1))
        return lo, hi

    def visible(self, p: Any, r: Any) -> Any:
        """Returns where positions ``p`` of queries see positions ``r`` of keys; None = all do."""
        lo, hi = self.key_bounds(p)
        return both(None if lo is None else r >= lo, None if hi is None else r <= hi)

    def merge(self, other: Rule) -> Rule | None:
        """The one rule equal to ``self`` and ``other`` together; None if there is none."""
        if self.trivial or other.trivial or self == other:
            return other if self.trivial else self
        if self.offset != other.offset:
            causal_only = all(r.window is None and r.chunk is None for r in (self, other))
            return replace(self, offset=min(self.offset, other.offset)) if causal_only else None
        chunk = self.chunk or other.chunk
        if self.chunk and other.chunk:
            chunk, coarse = sorted((self.chunk, other.chunk))
            if coarse % chunk:
                return None
        window = self.window or other.window
        if self.window and other.window:
            window = (min(self.window[0], other.window[0]), min(self.window[1], other.window[1]))
        return Rule(self.causal or other.causal, self.offset, window, chunk)


def both(a: Any, b: Any) -> Any:
    """Elementwise AND where None stands for True."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
