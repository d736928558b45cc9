"""A mask as text: one character per block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ejkernel.types.arrays import static_int
from ejkernel.types.convert import resolve_lengths
from ejkernel.types.summary import block_summary

if TYPE_CHECKING:
    from ejkernel.types.mask_info import MaskInfo

# empty, partial, full
CHARSETS = {"unicode": "·▒█", "ascii": ".+#"}


def block_map(
    mask: MaskInfo,
    block_size: int,
    batch: int,
    head: int,
    q_len: int | None,
    kv_len: int | None,
    charset: str,
) -> str:
    """Lines of a block map, queries downwards and keys to the right, with a legend."""
    if charset not in CHARSETS:
        raise ValueError(f"charset: must be one of {', '.join(CHARSETS)}, got {charset!r}")
    q_len, kv_len = resolve_lengths(mask, q_len, kv_len)
    kind = np.asarray(block_summary(mask, block_size, block_size, q_len, kv_len).kind)
    picks = []
    for name, index, size in (("batch", batch, kind.shape[0]), ("head", head, kind.shape[1])):
        index = static_int(index, name, low=0)
        if index >= size and size != 1:
            raise ValueError(f"{name}: must be less than {size}, got {index}")
        picks.append(0 if size == 1 else index)
    rows = kind[picks[0], picks[1]]
    signs = CHARSETS[charset]
    empty, partial, full = signs
    lines = [
        f"queries {q_len} (down) x keys {kv_len} (right), {block_size} x {block_size} per character"
    ]
    lines += ["".join(signs[k] for k in row) for row in rows]
    lines.append(f"{empty} empty  {partial} partial  {full} full")
    return "\n".join(lines)
