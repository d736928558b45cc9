"""BlockSummary: empty, partial and full blocks of a mask, and the ranges to visit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel.types.arrays import concrete_values, namespace, static_int
from ejkernel.types.masks.blocks import matrix_range
from ejkernel.types.masks.classify import classify_blocks
from ejkernel.types.masks.convert import resolve_lengths
from ejkernel.types.masks.fields import M, MaskFields, has_positions, lengths_of
from ejkernel.types.masks.prepare import prepare_mask

EMPTY, PARTIAL, FULL = 0, 1, 2


class BlockSummary(NamedTuple):
    """The visibility of each block of queries and keys.

    Attributes:
        kind: int8 ``[#b, #h, nq, nk]``, 0 empty (no visible pair), 1 partial, 2 full (every pair
            visible). Empty and full are exact claims; partial means mixed or not known.
        kv_start, kv_stop: int32 ``[#b, #h, nq]``, half-open range of the key blocks of a query
            block that are not empty; equal if there is none.
        q_start, q_stop: int32 ``[#b, #h, nk]``, the same with the axes exchanged.
    """

    kind: Any
    kv_start: Any
    kv_stop: Any
    q_start: Any
    q_stop: Any


def _host(mask: M) -> M:
    """``mask`` over numpy arrays if all its arrays are known, else ``mask``."""
    leaves, tree = jax.tree.flatten(mask)
    values = [concrete_values(x) for x in leaves]
    return mask if any(v is None for v in values) else jax.tree.unflatten(tree, values)


def _one_exact_constraint(mask: MaskFields) -> bool:
    """True if the block matrices are exact without looking at elements."""
    if mask._and:
        return False
    rule = not mask.rule.trivial
    count = rule + (mask.attention_mask is not None) + (mask.q_segment_ids is not None)
    if count != 1:
        return count == 0
    return mask.q_segment_ids is None and not (rule and has_positions(mask))


def _refine(mask: MaskFields, any_: np.ndarray, all_: np.ndarray, sizes: dict) -> None:
    """Decide, in place, the blocks that interval arithmetic leaves open, by their elements."""
    prepared = prepare_mask(mask, **sizes)
    t = prepared.tiling
    for qi, ki in np.argwhere((any_ & ~all_).any(axis=(0, 1))):
        tile = prepared.tile(int(qi), int(ki))
        rows = min(t.block_q, t.q_len - qi * t.block_q)
        keys = min(t.block_kv, t.kv_len - ki * t.block_kv)
        tile = tile[..., :rows, :keys]
        any_[..., qi, ki] = tile.any(axis=(2, 3))
        all_[..., qi, ki] = tile.all(axis=(2, 3))


def block_summary(
    mask: MaskFields, q_block: int, kv_block: int, q_len: int | None, kv_len: int | None
) -> BlockSummary:
    """BlockSummary of ``mask``; numpy and exact if all arrays are known, else traced."""
    q_block = static_int(q_block, "q_block", low=1)
    kv_block = static_int(kv_block, "kv_block", low=1)
    q_len, kv_len = resolve_lengths(mask, q_len, kv_len)
    mask = _host(mask)
    any_, all_ = classify_blocks(mask.terms, q_len, kv_len, q_block, kv_block)
    xp = namespace(any_)
    if xp is np and not _one_exact_constraint(mask):
        implied = lengths_of(mask)
        shape = (implied.batch or 1, implied.heads or 1, *any_.shape[2:])
        any_, all_ = (np.array(np.broadcast_to(x, shape)) for x in (any_, all_))
        sizes = {"q_len": q_len, "kv_len": kv_len, "block_q": q_block, "block_kv": kv_block}
        _refine(mask, any_, all_, sizes)
    kind = xp.where(any_, xp.where(all_, np.int8(FULL), np.int8(PARTIAL)), np.int8(EMPTY))
    by_query = matrix_range(xp, any_, all_)
    by_key = matrix_range(xp, any_.swapaxes(-1, -2), all_.swapaxes(-1, -2))
    return BlockSummary(kind, by_query.start, by_query.stop, by_key.start, by_key.stop)


# empty, partial, full
CHARSETS = {"unicode": "·▒█", "ascii": ".+#"}


def block_map(
    mask: MaskFields,
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
    text = [
        f"queries {q_len} (down) x keys {kv_len} (right), {block_size} x {block_size} per character"
    ]
    text += ["".join(signs[k] for k in row) for row in rows]
    text.append(f"{empty} empty  {partial} partial  {full} full")
    return "\n".join(text)
