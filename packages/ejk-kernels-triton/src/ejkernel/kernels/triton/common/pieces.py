"""Sizes of the grids over the pieces of ``sequences``.

Plans need them while tracing, and a machine that only traces may lack Triton.
"""

from __future__ import annotations


def piece_count(rows: int, sequences: int, length: int) -> int:
    """Returns the number of pieces of ``length`` rows, empty ones included."""
    return -(-rows // length) + sequences


def lane_count(sequences: int) -> int:
    """Returns LANES of ``sequences.find_piece``."""
    return max(16, min(1024, 1 << sequences.bit_length()))
