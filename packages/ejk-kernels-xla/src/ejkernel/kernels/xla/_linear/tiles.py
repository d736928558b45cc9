"""Chunk length of linear attention."""

from __future__ import annotations

from typing import Any

from ejkernel.types.attention import field

# below this many tokens the recurrence itself is cheaper than any chunk
STEP_LIMIT = 16
# products cost 2 s d (c + 2 d), the exponentials s log2(c) d: flat between 32 and 128 on a CPU
DEFAULT_CHUNK = 64


def chunk_length(tokens: int, sequences: int, cfg: Any) -> int:
    """The chunk of a call: what ``cfg.time_tile`` says, else what its lengths suggest."""
    tile = field(cfg, "time_tile")
    if tile is not None:
        if tile < 1 or tile & (tile - 1):
            raise ValueError(f"time_tile: must be a power of two, got {tile}")
        return int(tile)
    # sequences are padded to whole chunks: no longer than the mean one needs
    mean = max(tokens // max(sequences, 1), 1)
    return min(DEFAULT_CHUNK, max(16, 1 << (mean - 1).bit_length()))


def heuristic(inv: Any) -> dict[str, Any]:
    """The config fields that suit a call."""
    query, cu = inv.arguments["query"], inv.arguments.get("cu_seqlens")
    sequences = 1 if cu is None else cu.shape[0] - 1
    return {"time_tile": chunk_length(query.shape[1], sequences, None)}
