"""Real text that every Python has, as packed rows of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data import topics

import numpy as np

VOCABULARY = 256


@dataclass(frozen=True)
class Packed:
    """Rows of documents laid end to end.

    tokens: uint8[rows, length]; segment_ids: int32[rows, length], -1 = padding;
    positions: int32[rows, length], counted from each document's start.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def documents(longest: int) -> list[bytes]:
    """Python's help topics cut at blank lines into documents of 64 to ``longest`` bytes."""
    pieces = []
    for name in sorted(topics.topics):
        piece_text = b""
        for paragraph in topics.topics[name].encode("ascii", "replace").split(b"\n\n"):
            if piece_text and len(piece_text) + len(paragraph) > longest // 3:
                pieces.append(piece_text[:longest])
                piece_text = b""
            piece_text += paragraph + b"\n\n"
        pieces.append(piece_text[:longest])
    return [p for p in pieces if len(p) >= 64]


def pack(pieces: list[bytes], length: int, seed: int = 0) -> Packed:
    """First-fit packing of shuffled pieces into rows of ``length`` bytes."""
    order = np.random.default_rng(seed).permutation(len(pieces))
    rows: list[list[bytes]] = []
    room: list[int] = []
    for i in order:
        piece = pieces[i]
        # look at the last few open rows only: enough to fill them, and linear
        for r in range(max(0, len(rows) - 16), len(rows)):
            if room[r] >= len(piece):
                rows[r].append(piece)
                room[r] -= len(piece)
                break
        else:
            rows.append([piece])
            room.append(length - len(piece))
    tokens = np.zeros((len(rows), length), np.uint8)
    ids = np.full((len(rows), length), -1, np.int32)
    positions = np.zeros((len(rows), length), np.int32)
    for r, row in enumerate(rows):
        at = 0
        for d, piece in enumerate(row):
            end = at + len(piece)
            tokens[r, at:end] = np.frombuffer(piece, np.uint8)
            ids[r, at:end] = d
            positions[r, at:end] = np.arange(len(piece))
            at = end
    return Packed(tokens, ids, positions)
