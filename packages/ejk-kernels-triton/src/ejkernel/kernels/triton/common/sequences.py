"""Packed sequences cut into pieces that no two sequences share, found on the device.

A *piece* is what a sequence has of one tile of LENGTH rows. Piece ``i + m`` is the part of tile i
that belongs to sequence m: both only rise from row to row, so the number is unique and no table is
needed. The number of the first piece of a sequence rises with every sequence, so its sequence is
the last one that begins at or before it. Some pieces have no rows. Rows behind the last sequence
belong to one more sequence.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton


def piece_count(rows: int, sequences: int, length: int) -> int:
    """Returns the number of pieces of ``length`` rows, empty ones included."""
    return -(-rows // length) + sequences


def lane_count(sequences: int) -> int:
    """Returns LANES of ``find_piece``: sequences that are searched together."""
    return max(16, min(1024, 1 << sequences.bit_length()))


@triton.jit
def sequence_start(cu, sequence, sequences, rows):
    """Loads the first row of a sequence, clipped to the array; ``rows`` past the last sequence."""
    start = tl.load(cu + sequence, mask=sequence <= sequences, other=rows)
    return tl.minimum(tl.maximum(start, 0), rows)


@triton.jit
def find_piece(cu, sequences, rows, piece, LENGTH: tl.constexpr, LANES: tl.constexpr):
    """Returns (sequence, its first row, row past its last, first row of the tile) of a piece."""
    count = 0
    for at in range(0, sequences + 1, LANES):
        m = at + tl.arange(0, LANES)
        first = sequence_start(cu, m, sequences, rows) // LENGTH + m
        count += tl.sum(((first <= piece) & (m <= sequences)).to(tl.int32), 0)
    sequence = tl.maximum(count - 1, 0)
    start = sequence_start(cu, sequence, sequences, rows)
    end = sequence_start(cu, sequence + 1, sequences, rows)
    return sequence, start, end, (piece - sequence) * LENGTH


@triton.jit
def find_segment(
    cu, number, pieces, rows, sequences, LENGTH: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Returns (batch row, first row, row past the last, row past the last in use) of a piece.

    ``number`` counts the pieces of all batch rows; without ``cu`` pieces are LENGTH rows each. Rows
    behind the last sequence are not in use: they read as 0 and write 0.
    """
    batch = number // pieces
    piece = (number % pieces).to(tl.int32)
    begin = piece * LENGTH
    end = tl.minimum(rows, begin + LENGTH)
    used = end
    if cu is not None:
        cu += batch * (sequences + 1)
        sequence, start, end, begin = find_piece(cu, sequences, rows, piece, LENGTH, LANES)
        end = tl.minimum(end, begin + LENGTH)
        begin = tl.maximum(begin, start)
        used = tl.where(sequence < sequences, end, begin)
    return batch, begin, end, used


@triton.jit
def pieces_of(cu, sequence, sequences, rows, LENGTH: tl.constexpr):
    """Returns (first piece, piece past the last, rows) of a sequence."""
    start = sequence_start(cu, sequence, sequences, rows)
    end = sequence_start(cu, sequence + 1, sequences, rows)
    first = start // LENGTH + sequence
    last = tl.where(end > start, (end - 1) // LENGTH + sequence + 1, first)
    return first, last, tl.maximum(end - start, 0)
