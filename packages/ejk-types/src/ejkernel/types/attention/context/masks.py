"""Masks between this device's queries and the keys that are visiting it.

A mask is a tuple of MaskInfos, all of which must allow a pair. Their arrays are this device's:
ids and positions of its queries and keys, and a dense mask with its query rows and the
keys of all devices in the order of the key array. Ids and positions of keys travel with the keys;
where positions are not given, they are indices in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax

from ejkernel.types.attention.context.ring import Ring
from ejkernel.types.attention.rows import RowScales
from ejkernel.types.errors import invalid
from ejkernel.types.masks.combine import mask_of_rule
from ejkernel.types.masks.fields import NO_RULE, has_positions, with_private
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.rules import Rule

Terms = tuple[MaskInfo, ...]
TOKEN_FIELDS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")


def mask_terms(
    mask_info: MaskInfo | None,
    rule: Rule,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
) -> Terms:
    """Returns all constraints of a call. A rule of the call uses the positions of ``mask_info``."""
    terms = () if mask_info is None else mask_info.terms
    positions = {}
    if mask_info is not None:
        positions = {n: getattr(mask_info, n) for n in ("q_positions", "kv_positions")}
    if q_segment_ids is not None or kv_segment_ids is not None:
        kv = q_segment_ids if kv_segment_ids is None else kv_segment_ids
        terms += (MaskInfo(q_segment_ids=q_segment_ids, kv_segment_ids=kv),)
    if not rule.trivial:
        # not validated: the arrays of mask_info may be numpy, tracers or per head
        terms += (with_private(mask_of_rule(rule), **positions),)
    return terms


def is_by_index(term: MaskInfo) -> bool:
    """Returns whether a mask has a rule between indices in the whole sequence."""
    return not has_positions(term) and not term.rule.trivial


def index_rules(terms: Terms) -> tuple[Rule, ...]:
    """Returns the rules that hold between indices in the whole sequence."""
    return tuple(term.rule for term in terms if is_by_index(term))


def sees_itself(terms: Terms) -> bool:
    """Returns whether every query sees at least the key of its own index, for all that is known."""
    for term in terms:
        if jax.tree.leaves(term):
            return False
        low, high = term.rule.low_distance, term.rule.high_distance
        if term.rule.chunk is not None or (low or 0) > 0 or (high or 0) < 0:
            return False
    return True


def alive_rows(mods: Sequence[Any], terms: Terms, scales: RowScales) -> jax.Array | None:
    """Returns the rows that a backward pass may read, bool ``[b, q, h]``; None: all of them.

    A row without keys has weights of 0, and 0 * NaN would reach the keys' gradients.
    """
    return scales.alive if mods or not sees_itself(terms) else None


def check_keys(terms: Terms, total: int) -> None:
    """Raises an error where a dense mask has not the keys of all devices."""
    for term in terms:
        dense = term.attention_mask
        if dense is not None and dense.shape[3] != total and not is_stretched(term, 3):
            raise invalid("mask_info.attention_mask", f"all {total} keys on its last axis", dense)


def is_stretched(term: MaskInfo, axis: int) -> bool:
    """Returns whether an axis of size 1 of a dense mask stands for the full axis."""
    return term._broadcast and term.attention_mask.shape[axis] == 1


def key_arrays(terms: Terms) -> tuple:
    """Returns the arrays of each term that belong to keys, which travel with them."""
    return tuple((p.kv_segment_ids, p.kv_positions) for p in terms)


def piece_mask(
    ring: Ring,
    terms: Terms,
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
        _term_of_piece(ring, term, arrays, source, shift, q_len, kv_len, rows, keys)
        for term, arrays in zip(terms, visiting, strict=True)
    ]
    return reduce(lambda a, b: a & b, local) if local else MaskInfo()


def _term_of_piece(
    ring: Ring, term: MaskInfo, visiting: tuple, source: Any, shift: int | None, q_len: int,
    kv_len: int, rows: slice, keys: slice,
) -> MaskInfo:  # fmt: skip
    kv_ids, kv_positions = visiting
    fields: dict[str, Any] = {"_and": (), "q_positions": None, "kv_positions": None}
    if term.q_segment_ids is not None:
        fields["q_segment_ids"] = term.q_segment_ids[..., rows]
        fields["kv_segment_ids"] = kv_ids[..., keys]
    dense = term.attention_mask
    if dense is not None:
        if not is_stretched(term, 2):
            dense = dense[:, :, rows]
        if not is_stretched(term, 3):
            dense = slice_columns(dense, source, kv_len, keys)
        fields["attention_mask"] = dense
    if is_by_index(term) and term.rule.chunk is None:
        if shift is None:
            fields |= NO_RULE
        else:
            fields["causal_offset"] = term.causal_offset + shift
    elif not term.rule.trivial:
        # chunks begin at multiples of their length, which an offset cannot express
        q_positions = term.q_positions
        if q_positions is None:
            q_positions = ring.index(ring.device_index(), q_len)[None]
        if kv_positions is None:
            kv_positions = ring.index(source, kv_len)[None]
        fields["q_positions"] = q_positions[..., rows]
        fields["kv_positions"] = kv_positions[..., keys]
    return with_private(term, **fields)


def slice_columns(x: jax.Array, source: Any, kv_len: int, keys: slice) -> jax.Array:
    """Returns the columns of ``[#b, #h, q, all keys]`` that are ``keys`` of device ``source``."""
    start = source * kv_len + keys.start
    return jax.lax.dynamic_slice_in_dim(x, start, keys.stop - keys.start, 3)
