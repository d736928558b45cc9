"""Pieces of attention between the shards of two devices: rectangles that one kernel call computes.

A shard is one contiguous range of the sequence (contiguous) or two (zigzag). Causal and window
rules between indices decide, for each pair of ranges, whether it is hidden, fully visible or
partly visible. Neighbouring ranges are joined into one call where one rule describes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ejkernel.types.masks.rules import Rule

HIDDEN, FULL, PARTIAL = "hidden", "full", "partial"


class Chunks(NamedTuple):
    """Consecutive chunks of a shard."""

    first: int
    count: int


@dataclass(frozen=True)
class Piece:
    """Queries and keys of one kernel call.

    Attributes:
        q, kv: chunks of the two shards.
        shift: what index rules add to their offset, as queries and keys count from 0 in the call;
            None: they hide nothing here.
    """

    q: Chunks
    kv: Chunks
    shift: int | None


@dataclass(frozen=True)
class Cells:
    """All pairs of chunks of a query shard and of a key shard.

    Attributes:
        rules: between indices of the full sequence.
        shifts: index of the first query minus index of the first key, by chunk of queries and
            chunk of keys.
        q_chunk, kv_chunk: lengths.
        joined: whether a piece may hold several chunks.
    """

    rules: tuple[Rule, ...]
    shifts: tuple[tuple[int, ...], ...]
    q_chunk: int
    kv_chunk: int
    joined: bool = True

    def pieces(self, of_keys: int | None = None) -> tuple[Piece, ...]:
        """Returns the fewest pieces that cover every visible pair.

        ``of_keys``: the chunk of keys; None: all.
        """
        q, kv = (Chunks(0, len(rows)) for rows in (self.shifts, self.shifts[0]))
        if of_keys is None:
            return tuple(self._cover(q, kv))
        shifts = [row[of_keys] for row in self.shifts]
        seeing = [i for i, shift in enumerate(shifts) if self._visibility(shift) != HIDDEN]
        if not seeing:
            return ()
        q = Chunks(seeing[0], seeing[-1] - seeing[0] + 1)
        return tuple(self._cover(q, Chunks(of_keys, 1)))

    def _visibility(self, shift: int) -> str:
        nearest = -shift - (self.q_chunk - 1)  # bounds of key index - query index
        farthest = self.kv_chunk - 1 - shift
        full = True
        for rule in self.rules:
            low, high = rule.low_distance, rule.high_distance
            if (high is not None and nearest > high) or (low is not None and farthest < low):
                return HIDDEN
            full &= (high is None or farthest <= high) and (low is None or nearest >= low)
        return FULL if full else PARTIAL

    def _cover(self, q: Chunks, kv: Chunks) -> list[Piece]:
        cells = [
            (a, b, self.shifts[a][b])
            for a in range(q.first, q.first + q.count)
            for b in range(kv.first, kv.first + kv.count)
        ]
        kinds = {self._visibility(shift) for *_, shift in cells}
        if kinds == {HIDDEN}:
            return []
        single = q.count == kv.count == 1
        if single or self.joined:
            if kinds == {FULL}:
                return [Piece(q, kv, None)]
            for a, b, shift in cells:
                start = shift - (a - q.first) * self.q_chunk + (b - kv.first) * self.kv_chunk
                if self._describes(start, q, kv, cells):
                    return [Piece(q, kv, start)]
        covers = []
        for axis, chunks in enumerate((q, kv)):
            if chunks.count > 1:
                halves = [Chunks(i, 1) for i in range(chunks.first, chunks.first + chunks.count)]
                pairs = [(half, kv) if axis == 0 else (q, half) for half in halves]
                covers.append([piece for pair in pairs for piece in self._cover(*pair)])
        return min(covers, key=len)

    def _describes(
        self, start: int, q: Chunks, kv: Chunks, cells: Sequence[tuple[int, int, int]]
    ) -> bool:
        """Returns whether rules shifted by ``start`` are right in all cells of one call."""
        for a, b, shift in cells:
            in_call = start + (a - q.first) * self.q_chunk - (b - kv.first) * self.kv_chunk
            kind = self._visibility(shift)
            if in_call != shift and (kind == PARTIAL or kind != self._visibility(in_call)):
                return False
        return True
