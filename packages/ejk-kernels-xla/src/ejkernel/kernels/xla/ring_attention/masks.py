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

from ejkernel.kernels.xla.ring_attention.ring import Ring
from ejkernel.types import MaskInfo, PreparedMask, Rule, prepare_mask
from ejkernel.types.errors import invalid
from ejkernel.types.masks.fields import with_private

Parts = tuple[MaskInfo, ...]


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


def index_rules(parts: Parts) -> list[Rule]:
    """The rules that hold between indices in the whole sequence."""
    by_index = (p for p in parts if p.q_positions is None and p.kv_positions is None)
    return [p.rule for p in by_index if not p.rule.trivial]


def check_keys(parts: Parts, total: int) -> None:
    """A dense mask has the keys of all devices."""
    for part in parts:
        dense = part.attention_mask
        if dense is not None and dense.shape[3] != total and not _stretched(part, 3):
            raise invalid("mask_info.attention_mask", f"all {total} keys on its last axis", dense)


def _stretched(part: MaskInfo, axis: int) -> bool:
    return part._broadcast and part.attention_mask.shape[axis] == 1


def travelling(parts: Parts) -> tuple:
    """The arrays of a mask that belong to keys."""
    return tuple((p.kv_segment_ids, p.kv_positions) for p in parts)


def columns(x: jax.Array, source: Any, kv_len: int) -> jax.Array:
    """The columns of ``x`` ``[#b, #h, q, all keys]`` that belong to device ``source``."""
    if x.shape[3] == kv_len:
        return x
    return jax.lax.dynamic_slice_in_dim(x, source * kv_len, kv_len, 3)


def visible(
    ring: Ring,
    parts: Parts,
    visiting: tuple,
    source: Any,
    *,
    q_len: int,
    kv_len: int,
    block_q: int,
    block_kv: int,
) -> PreparedMask:
    """The mask between this device's queries and the keys of device ``source``."""
    local = []
    for part, (kv_ids, kv_positions) in zip(parts, visiting, strict=True):
        fields: dict[str, Any] = {"kv_segment_ids": kv_ids, "_and": ()}
        if part.attention_mask is not None and not _stretched(part, 3):
            fields["attention_mask"] = columns(part.attention_mask, source, kv_len)
        q_positions = part.q_positions
        if part.rule.trivial:
            q_positions = kv_positions = None
        elif ring.size > 1:
            if q_positions is None:
                q_positions = ring.index(ring.device_index(), q_len)[None]
            if kv_positions is None:
                kv_positions = ring.index(source, kv_len)[None]
        fields |= {"q_positions": q_positions, "kv_positions": kv_positions}
        local.append(with_private(part, **fields))
    mask = reduce(lambda a, b: a & b, local) if local else MaskInfo()
    sizes = {"q_len": q_len, "kv_len": kv_len, "block_q": block_q, "block_kv": block_kv}
    return prepare_mask(mask, **sizes)
