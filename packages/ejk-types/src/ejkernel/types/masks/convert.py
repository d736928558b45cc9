"""From constraints to dense arrays and back: masks, segment ids, padding masks, biases."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import (
    AnyArray,
    Array,
    as_bool,
    int_array,
    is_array,
    mask_array,
    namespace,
    static_length,
)
from ejkernel.types.errors import invalid
from ejkernel.types.masks.blocks import INT_MAX
from ejkernel.types.masks.fields import MaskFields, lengths_of, per_head
from ejkernel.types.masks.rules import both
from ejkernel.types.masks.segments import cu_seqlens_mask_fields, positions_in_segments


def id_pair(ids: Any, kv_ids: Any = None) -> tuple[Any, Any]:
    """Ids ``[b, q]``, ``[b, k]`` from one array, a pair of arrays, or two arguments."""
    if isinstance(ids, (tuple, list)):
        if len(ids) != 2:
            raise invalid("ids", "an array or a pair (q_ids, kv_ids)", ids)
        ids, kv_ids = ids
    ids_q = int_array(ids, "q_ids", "[batch, q_len]", (2,))
    if kv_ids is None or kv_ids is ids:
        return ids_q, ids_q
    ids_kv = int_array(kv_ids, "kv_ids", "[batch, kv_len]", (2,))
    if 1 not in (ids_q.shape[0], ids_kv.shape[0]) and ids_q.shape[0] != ids_kv.shape[0]:
        raise invalid("kv_ids", f"batch {ids_q.shape[0]} (or 1)", ids_kv)
    return ids_q, ids_kv


def segment_ids_to_qkv_masks(
    q_ids: Array, kv_ids: Array | None = None, dtype: Any = bool
) -> tuple[Array, Array, Array]:
    """``(q_mask [b, q], kv_mask [b, k], mask [b, 1, q, k])`` of segment ids, in ``dtype``.

    q_mask and kv_mask are nonzero for ids >= 0; mask where the ids are equal and >= 0.
    ``kv_ids`` defaults to ``q_ids``.
    """
    q, kv = id_pair(q_ids, kv_ids)
    mask = (q[:, None, :, None] == kv[:, None, None, :]) & (q[:, None, :, None] >= 0)
    return (q >= 0).astype(dtype), (kv >= 0).astype(dtype), mask.astype(dtype)


@overload
def segment_ids_to_mask(
    ids: Array | tuple[Array, Array],
    dtype: Any = bool,
    return_separate_masks: Literal[False] = False,
) -> Array: ...


@overload
def segment_ids_to_mask(
    ids: Array | tuple[Array, Array], dtype: Any = bool, *, return_separate_masks: Literal[True]
) -> tuple[Array, Array, Array]: ...


def segment_ids_to_mask(
    ids: Any, dtype: Any = bool, return_separate_masks: bool = False
) -> AnyArray | tuple[AnyArray, AnyArray, AnyArray]:
    """Dense mask ``[b, 1, q, k]`` of ids ``[b, s]`` or of a pair ``([b, q], [b, k])``.

    Two tokens see each other iff their ids are equal and not negative.
    ``return_separate_masks`` gives ``(q_mask, kv_mask, mask)`` of segment_ids_to_qkv_masks.
    """
    masks = segment_ids_to_qkv_masks(*id_pair(ids), dtype=dtype)
    return masks if return_separate_masks else masks[2]


def mask_to_segment_ids(mask: Array, per_head: bool = False) -> tuple[Array, Array]:
    """``(q_ids, kv_ids)`` of a dense mask ``[b, h, q, k]`` or ``[b, q, k]`` (nonzero = visible).

    Heads are ORed, giving ``[b, q]`` and ``[b, k]``; ``per_head`` gives ``[b, h, q]`` and
    ``[b, h, k]``. Equal rows get equal ids, unequal rows unequal ids, numbered by first
    appearance from 0; rows that see nothing get -1. A key gets the id of the first row that sees
    it, else -1. An exact inverse iff the mask is a segment mask. O(q*q*k) work.
    """
    mask = mask_array(mask, "mask", "[batch, heads, q_len, kv_len] or [batch, q, k]", (3, 4))
    if mask.ndim == 3:
        mask = mask[:, None]
    if not per_head:
        mask = mask.any(axis=1)
    xp = namespace(mask)
    q_len, kv_len = mask.shape[-2:]
    if q_len == 0 or kv_len == 0:
        return (
            xp.full(mask.shape[:-1], -1, np.int32),
            xp.full((*mask.shape[:-2], kv_len), -1, np.int32),
        )
    # a matmul of 0/1 matrices is exact; equal rows share as many keys as each of them sees
    bits = mask.astype(np.float32)
    shared = xp.matmul(bits, bits.swapaxes(-1, -2))
    seen = bits.sum(-1)
    equal = (shared == seen[..., :, None]) & (shared == seen[..., None, :])
    first = xp.argmax(equal, axis=-1)
    index = xp.broadcast_to(xp.arange(q_len, dtype=first.dtype), first.shape)
    leads = (first == index) & (seen > 0)
    number = xp.cumsum(leads, axis=-1) - 1
    q_ids = xp.where(seen > 0, xp.take_along_axis(number, first, axis=-1), -1)
    owner = xp.argmax(mask, axis=-2)
    kv_ids = xp.where(mask.any(axis=-2), xp.take_along_axis(q_ids, owner, axis=-1), -1)
    return q_ids.astype(np.int32), kv_ids.astype(np.int32)


def cu_seqlens_to_mask(
    cu_q: Array, cu_kv: Array | None = None, *, max_q_len: int, max_kv_len: int | None = None
) -> Array:
    """Dense bool ``[b, 1, max_q_len, max_kv_len]``: sequence m of q sees sequence m of k.

    ``[n+1]`` cumulative lengths give b = 1. ``cu_kv`` and ``max_kv_len`` default to q's.
    """
    q_len = static_length(max_q_len, "max_q_len")
    kv_len = q_len if max_kv_len is None else static_length(max_kv_len, "max_kv_len")
    fields = cu_seqlens_mask_fields(cu_q, cu_kv, q_len, kv_len, names=("cu_q", "cu_kv"))
    return segment_ids_to_mask((fields["q_segment_ids"], fields["kv_segment_ids"]))


def resolve_lengths(mask: MaskFields, q_len: int | None, kv_len: int | None) -> tuple[int, int]:
    """Both lengths, from the arrays or the arguments; ValueError if one is in neither."""
    arrays = lengths_of(mask)
    result: list[int] = []
    for name, size, array_size in (("q_len", q_len, arrays.q), ("kv_len", kv_len, arrays.kv)):
        if size is not None:
            size = static_length(size, name)
        if size is not None and array_size is not None and size != array_size:
            raise invalid(name, f"{array_size}, the length of the mask's arrays", size)
        length = array_size if size is None else size
        if length is None:
            raise ValueError(f"{name}: no array of this mask has this length; give {name}=")
        result.append(length)
    return result[0], result[1]


def dense_term(term: MaskFields, q_len: int, kv_len: int) -> Any:
    """Visibility of one term, broadcastable to ``[b, h, q, k]``; None = all visible."""
    result = None if term.attention_mask is None else as_bool(term.attention_mask)
    if term.q_segment_ids is not None:
        q = per_head(term.q_segment_ids)[..., :, None]
        kv = per_head(term.kv_segment_ids)[..., None, :]
        result = both(result, (q == kv) & (q >= 0))
    if not term.rule.trivial:
        p, r = term.q_positions, term.kv_positions
        p = np.arange(q_len, dtype=np.int32)[None, None] if p is None else per_head(p)
        r = np.arange(kv_len, dtype=np.int32)[None, None] if r is None else per_head(r)
        result = both(result, term.rule.visible(p[..., :, None], r[..., None, :]))
    return result


def dense_mask(mask: MaskFields, q_len: int | None = None, kv_len: int | None = None) -> Any:
    """bool ``[b, 1|h, q, k]`` of all constraints of ``mask``."""
    q_len, kv_len = resolve_lengths(mask, q_len, kv_len)
    sizes = lengths_of(mask)
    result = None
    for term in mask.terms:
        result = both(result, dense_term(term, q_len, kv_len))
    batch = 1 if sizes.batch is None else sizes.batch
    heads = 1 if sizes.heads is None else sizes.heads
    if result is None:
        arrays = [x for term in mask.terms for x in (term.q_positions, term.kv_positions)]
        return namespace(*arrays).ones((batch, heads, q_len, kv_len), bool)
    return namespace(result).broadcast_to(result, (batch, heads, q_len, kv_len))


def mask_to_bias(mask: Any, dtype: Any) -> Any:
    """0 where ``mask`` is visible, the least finite value of ``dtype`` elsewhere."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise invalid("dtype", "a float dtype", str(dtype))
    low = np.asarray(jnp.finfo(dtype).min, dtype)
    return namespace(mask).where(mask, np.zeros((), dtype), low)


def read_segment_ids(mask: MaskFields, per_head: bool = False) -> tuple[Any, Any]:
    """Stored ids, else ids of the dense mask ``mask`` means; ``[b, len]`` or ``[b, h, len]``."""
    if mask.q_segment_ids is not None:
        q, kv = mask.q_segment_ids, mask.kv_segment_ids
        if per_head and q.ndim == 2:
            heads = lengths_of(mask).heads or 1
            xp = namespace(q, kv)
            q, kv = (xp.broadcast_to(x[:, None], (x.shape[0], heads, x.shape[-1])) for x in (q, kv))
        return q, kv
    return mask_to_segment_ids(dense_mask(mask), per_head)


def _tokens(mask: MaskFields, side: str) -> tuple[int, int]:
    """Batch rows and tokens of one side."""
    lengths = lengths_of(mask)
    size = lengths.q if side == "q" else lengths.kv
    if size is None:
        raise ValueError(f"{side}_len: a purely structural mask has no length")
    return lengths.batch or 0, size


def padding_mask(mask: MaskFields, side: str) -> Any:
    """Tokens that are not padding, bool ``[b, len]``; ``side`` is "q" or "kv".

    By segment ids where there are any, else by the dense mask: tokens of a row or column that
    is not wholly invisible. Causal, window and chunk make no padding.
    """
    name, valid = f"{side}_segment_ids", None
    for term in mask.terms:
        ids = getattr(term, name)
        if ids is not None:
            valid_ids = ids >= 0
            valid = both(valid, valid_ids.any(axis=1) if valid_ids.ndim == 3 else valid_ids)
    if valid is None:
        for term in mask.terms:
            if term.attention_mask is not None:
                dense = as_bool(term.attention_mask)
                valid = both(valid, dense.any(axis=(1, 3) if side == "q" else (1, 2)))
    if valid is None:
        valid = np.ones((1, 1), bool)
    return namespace(valid).broadcast_to(valid, _tokens(mask, side))


def read_positions(mask: MaskFields, side: str) -> Any:
    """Positions int32 ``[b, len]``: given ones, else counted per run of equal ids, else the index.

    Padding by the stored ids is -1 for queries and 2**31-1 for keys.
    """
    padding = -1 if side == "q" else INT_MAX
    ids, positions = getattr(mask, f"{side}_segment_ids"), getattr(mask, f"{side}_positions")
    if ids is not None and ids.ndim == 3:
        ids = ids.max(axis=1)
    if positions is not None:
        if ids is None:
            return positions
        return namespace(positions, ids).where(ids >= 0, positions, np.int32(padding))
    if ids is not None:
        return positions_in_segments(ids, padding)
    shape = _tokens(mask, side)
    return np.broadcast_to(np.arange(shape[1], dtype=np.int32)[None], shape)


def recast(mask: Any, dtype: Any) -> Any:
    """A dense mask in ``dtype``: 1 where visible, 0 elsewhere."""
    return mask.astype(dtype) if is_array(mask) else mask
