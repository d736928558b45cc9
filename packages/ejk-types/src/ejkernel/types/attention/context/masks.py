"""Masks between this device's queries and the keys that are visiting it.

A mask is a tuple of MaskInfos, all of which must allow a pair. Their arrays are this device's:
ids and positions of its queries and keys, and a dense mask with its query rows and the
keys of all devices in the order of the key array. Ids and positions of keys travel with the keys;
where positions are not given, they are indices in the whole sequence.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax

from ejkernel.types.attention.context.ring import Ring
from ejkernel.types.errors import invalid
from ejkernel.types.masks.fields import NO_RULE, with_private
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.rules import Rule

Parts = tuple[MaskInfo, ...]
TOKENS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")


def parts_of(
    mask_info: MaskInfo | None,
    rule: Rule,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
) -> Parts:
    """All constraints of a call. A rule of the call uses the positions of ``mask_info``."""
    parts = () if mask_info is None else mask_info.terms
    positions = {}
    if mask_info is not None:
        positions = {n: getattr(mask_info, n) for n in ("q_positions", "kv_positions")}
    if q_segment_ids is not None or kv_segment_ids is not None:
        kv = q_segment_ids if kv_segment_ids is None else kv_segment_ids
        parts += (MaskInfo(q_segment_ids=q_segment_ids, kv_segment_ids=kv),)
    if not rule.trivial:
        rule_mask = MaskInfo(
            causal=rule.causal,
            causal_offset=rule.offset,
            sliding_window=rule.window,
            chunk_size=rule.chunk,
        )
        # set after validation: the arrays of mask_info may be numpy, tracers or per head
        parts += (with_private(rule_mask, **positions),)
    return parts


def is_by_index(part: MaskInfo) -> bool:
    """Returns whether a mask has a rule between indices in the whole sequence."""
    return part.q_positions is None and part.kv_positions is None and not part.rule.trivial


def index_rules(parts: Parts) -> tuple[Rule, ...]:
    """The rules that hold between indices in the whole sequence."""
    return tuple(part.rule for part in parts if is_by_index(part))


def sees_itself(parts: Parts) -> bool:
    """Returns whether every query sees at least the key of its own index, for all that is known."""
    for part in parts:
        if jax.tree.leaves(part):
            return False
        low, high = part.rule.low_distance, part.rule.high_distance
        if part.rule.chunk is not None or (low or 0) > 0 or (high or 0) < 0:
            return False
    return True


def check_keys(parts: Parts, total: int) -> None:
    """A dense mask has the keys of all devices."""
    for part in parts:
        dense = part.attention_mask
        if dense is not None and dense.shape[3] != total and not is_stretched(part, 3):
            raise invalid("mask_info.attention_mask", f"all {total} keys on its last axis", dense)


def is_stretched(part: MaskInfo, axis: int) -> bool:
    """Returns whether an axis of size 1 of a dense mask stands for the full axis."""
    return part._broadcast and part.attention_mask.shape[axis] == 1


def travelling(parts: Parts) -> tuple:
    """The arrays of a mask that belong to keys."""
    return tuple((p.kv_segment_ids, p.kv_positions) for p in parts)


def piece_mask(
    ring: Ring,
    parts: Parts,
    visiting: tuple,
    source: Any,
    shift: int | None,
    *,
    lengths: tuple[int, int],
    rows: slice,
    keys: slice,
) -> MaskInfo:
    """Returns the mask between rows of this device's queries and keys of device ``source``.

    ``shift``: what index rules add to their offset, None where they hide nothing. ``lengths`` of
    the shards of queries and keys.
    """
    q_len, kv_len = lengths
    local = [
        _piece_of(ring, part, arrays, source, shift, q_len, kv_len, rows, keys)
        for part, arrays in zip(parts, visiting, strict=True)
    ]
    return reduce(lambda a, b: a & b, local) if local else MaskInfo()


def _piece_of(
    ring: Ring, part: MaskInfo, visiting: tuple, source: Any, shift: int | None, q_len: int,
    kv_len: int, rows: slice, keys: slice,
) -> MaskInfo:  # fmt: skip
    kv_ids, kv_positions = visiting
    fields: dict[str, Any] = {"_and": (), "q_positions": None, "kv_positions": None}
    if part.q_segment_ids is not None:
        fields["q_segment_ids"] = part.q_segment_ids[..., rows]
        fields["kv_segment_ids"] = kv_ids[..., keys]
    dense = part.attention_mask
    if dense is not None:
        if not is_stretched(part, 2):
            dense = dense[:, :, rows]
        if not is_stretched(part, 3):
            dense = columns(dense, source, kv_len, keys)
        fields["attention_mask"] = dense
    if is_by_index(part) and part.rule.chunk is None:
        if shift is None:
            fields |= NO_RULE
        else:
            fields["causal_offset"] = part.causal_offset + shift
    elif not part.rule.trivial:
        # chunks begin at multiples of their length, which an offset cannot express
        q_positions = part.q_positions
        if q_positions is None:
            q_positions = ring.index(ring.device_index(), q_len)[None]
        if kv_positions is None:
            kv_positions = ring.index(source, kv_len)[None]
        fields["q_positions"] = q_positions[..., rows]
        fields["kv_positions"] = kv_positions[..., keys]
    return with_private(part, **fields)


def columns(x: jax.Array, source: Any, kv_len: int, keys: slice) -> jax.Array:
    """The columns of ``x`` ``[#b, #h, q, all keys]`` that belong to ``keys`` of ``source``."""
    start = source * kv_len + keys.start
    return jax.lax.dynamic_slice_in_dim(x, start, keys.stop - keys.start, 3)
