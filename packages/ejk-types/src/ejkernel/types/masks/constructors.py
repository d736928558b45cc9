"""Constructors of masks, classmethods of MaskInfo."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self, TypedDict, TypeVar, Unpack

import numpy as np

from ejkernel.types.arrays import (
    int_array,
    is_array,
    mask_array,
    namespace,
    static_int,
    static_length,
)
from ejkernel.types.errors import invalid
from ejkernel.types.masks.fields import AXES, AxisName, MaskFields
from ejkernel.types.masks.segments import cu_seqlens_mask_fields


class AxisNames(TypedDict, total=False):
    """The mesh axes that ``get_shardings`` uses; the same keywords in every constructor."""

    batch_axis_name: AxisName
    qheads_axis_name: AxisName
    kvheads_axis_name: AxisName
    sequence_axis_name: AxisName


F = TypeVar("F", bound=Callable[..., Any])


def axis_keywords(function: F) -> F:
    """``function(..., **axes)`` with the four names spelled out for ``help`` and ``inspect``."""
    signature = inspect.signature(function)
    fields = inspect.signature(MaskFields.__init__).parameters
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [fields[name] for name in AXES]
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    return function


def padding_ids(mask: Any, argument: str, valid: bool = True) -> Any:
    """Ids 0 / -1 int32 ``[b, s]`` of a padding mask; ``valid`` False inverts it."""
    keep = mask_array(mask, argument, "[batch, length]", (2,))
    keep = keep if valid else ~keep
    return namespace(keep).where(keep, np.int32(0), np.int32(-1))


def length_ids(lengths: Any, argument: str, size: int) -> Any:
    """Ids 0 for the first ``lengths[b]`` of ``size`` tokens, else -1, int32 ``[b, size]``."""
    lengths = int_array(lengths, argument, "[batch]", (1,))
    token = np.arange(size, dtype=np.int32)
    inside = token[None] < lengths[:, None]
    return namespace(lengths).where(inside, np.int32(0), np.int32(-1))


class Constructors(MaskFields):
    """The constructors of MaskInfo besides ``MaskInfo(**fields)``."""

    __slots__ = ()

    @classmethod
    @axis_keywords
    def from_segments(
        cls,
        q_segment_ids: Any,
        kv_segment_ids: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        *,
        is_attn_mask: bool = False,
        **axes: Unpack[AxisNames],
    ) -> Self:
        """Packed or padded sequences: tokens see each other iff ids are equal and >= 0.

        q_segment_ids: int ``[#batch, q_len]``; kv_segment_ids: int ``[#batch, kv_len]``, default
        the same object. With ``is_attn_mask`` both are 0/1 padding masks and become ids 0 / -1.
        Raises InvalidArgument for a wrong dtype, rank or size.
        """
        ids = {"q_segment_ids": q_segment_ids}
        if kv_segment_ids is not None and kv_segment_ids is not q_segment_ids:
            ids["kv_segment_ids"] = kv_segment_ids
        if is_attn_mask:
            ids = {name: padding_ids(mask, name) for name, mask in ids.items()}
        if q_segment_ids is None:
            raise invalid("q_segment_ids", "integer[#batch, q_len]", None)
        return cls(
            q_segment_ids=ids["q_segment_ids"],
            kv_segment_ids=ids.get("kv_segment_ids", ids["q_segment_ids"]),
            q_positions=q_positions,
            kv_positions=kv_positions,
            **axes,
        )

    @classmethod
    @axis_keywords
    def from_attention_mask(
        cls,
        attention_mask: Any,
        q_positions: Any = None,
        kv_positions: Any = None,
        *,
        mask_is_valid: bool = True,
        q_len: int | None = None,
        **axes: Unpack[AxisNames],
    ) -> Self:
        """From a bool or integer mask (nonzero = visible).

        ``[batch, s]`` is a padding mask and becomes segment ids 0 / -1 for queries and keys, no
        dense mask; ``[batch, q, k]`` gets a head axis; ``[#batch, #heads, q, k]`` is kept.
        ``mask_is_valid=False`` means nonzero = hidden. ``q_len``: number of queries where it is
        not that of the keys; then ``[batch, s]`` is a padding mask of the keys alone.

        Raises InvalidArgument for float masks, other ranks and another ``q_len``.
        """
        axes_text = "[batch, s], [batch, q_len, kv_len] or [#batch, #heads, q_len, kv_len]"
        mask = mask_array(attention_mask, "attention_mask", axes_text, (2, 3, 4))
        dense = ids = q_ids = None
        if mask.ndim == 2:
            ids = padding_ids(mask, "attention_mask", mask_is_valid)
            q_ids = ids
            if q_len is not None and static_length(q_len, "q_len") != mask.shape[1]:
                q_ids = np.zeros((1, q_len), np.int32)
        else:
            dense = mask if mask_is_valid else ~mask
            dense = dense[:, None] if dense.ndim == 3 else dense
            if q_len is not None and dense.shape[2] != q_len:
                raise invalid("attention_mask", f"an array with q_len {q_len}", attention_mask)
        return cls(
            attention_mask=dense,
            q_segment_ids=q_ids,
            kv_segment_ids=ids,
            q_positions=q_positions,
            kv_positions=kv_positions,
            **axes,
        )

    @classmethod
    @axis_keywords
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Any,
        cu_seqlens_kv: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        *,
        max_q_len: int,
        max_kv_len: int | None = None,
        **axes: Unpack[AxisNames],
    ) -> Self:
        """Packed sequences by standard cumulative lengths ``[n+1]`` or ``[batch, n+1]``.

        ``max_q_len``, ``max_kv_len``: static lengths of the packed axes (kv defaults to q). Sets
        segment ids (-1 past the end) and positions inside each sequence, which causal, window
        and chunk rules then use. Works under jit.
        """
        q_len = static_length(max_q_len, "max_q_len")
        kv_len = q_len if max_kv_len is None else static_length(max_kv_len, "max_kv_len")
        fields = cu_seqlens_mask_fields(cu_seqlens_q, cu_seqlens_kv, q_len, kv_len)
        return cls(
            q_segment_ids=fields["q_segment_ids"],
            kv_segment_ids=fields["kv_segment_ids"],
            q_positions=fields["q_positions"] if q_positions is None else q_positions,
            kv_positions=fields["kv_positions"] if kv_positions is None else kv_positions,
            **axes,
        )

    @classmethod
    @axis_keywords
    def from_lengths(
        cls,
        q_lengths: Any,
        kv_lengths: Any = None,
        *,
        max_q_len: int,
        max_kv_len: int | None = None,
        **axes: Unpack[AxisNames],
    ) -> Self:
        """Padded batch: the first ``lengths[b]`` tokens of each row are real.

        q_lengths, kv_lengths: int ``[batch]``, kv defaults to q. Works under jit.
        """
        q_len = static_length(max_q_len, "max_q_len")
        kv_len = q_len if max_kv_len is None else static_length(max_kv_len, "max_kv_len")
        q_ids = kv_ids = length_ids(q_lengths, "q_lengths", q_len)
        if kv_lengths is not None or kv_len != q_len:
            lengths = q_lengths if kv_lengths is None else kv_lengths
            kv_ids = length_ids(lengths, "kv_lengths", kv_len)
        return cls(q_segment_ids=q_ids, kv_segment_ids=kv_ids, **axes)

    @classmethod
    @axis_keywords
    def from_causal(cls, *, offset: int = 0, **axes: Unpack[AxisNames]) -> Self:
        """``j <= i + offset``; fits any shape. ``offset = kv_len - q_len`` aligns the ends."""
        return cls(causal=True, causal_offset=offset, **axes)

    @classmethod
    @axis_keywords
    def from_sliding_window(
        cls,
        window: int | tuple[int, int],
        *,
        causal: bool = False,
        offset: int = 0,
        **axes: Unpack[AxisNames],
    ) -> Self:
        """``i + offset - left <= j <= i + offset + right``; an int w means (w, w).

        ``causal`` also demands ``j <= i + offset``. Fits any shape. Negative -> ValueError.
        """
        if window is None:
            raise invalid("window", "an int or a tuple (left, right)", None)
        return cls(sliding_window=window, causal=causal, causal_offset=offset, **axes)

    @classmethod
    @axis_keywords
    def from_random(
        cls,
        batch_size: int,
        q_len: int,
        kv_len: int | None = None,
        sparsity: float = 0.5,
        seed: int = 0,
        q_positions: Any = None,
        kv_positions: Any = None,
        **axes: Unpack[AxisNames],
    ) -> Self:
        """Dense ``[batch_size, 1, q_len, kv_len]`` with each pair visible by chance 1 - sparsity.

        kv_len defaults to q_len. The same seed gives the same mask. ValueError unless
        0 <= sparsity <= 1.
        """
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity: must lie in [0, 1], got {sparsity}")
        shape = (
            static_int(batch_size, "batch_size", low=0),
            1,
            static_length(q_len, "q_len"),
            static_length(q_len if kv_len is None else kv_len, "kv_len"),
        )
        keep = np.random.default_rng(static_int(seed, "seed")).random(shape) >= sparsity
        return cls(attention_mask=keep, q_positions=q_positions, kv_positions=kv_positions, **axes)

    @classmethod
    def dynamic_init(
        cls,
        *,
        mask_info: Self | None = None,
        input_ids: Any = None,
        inputs_embeds: Any = None,
        attention_mask: Any = None,
    ) -> Self:
        """``mask_info`` itself, else from ``attention_mask``, else everything visible.

        input_ids ``[batch, s]`` or inputs_embeds ``[batch, s, ...]`` give the shape of the last
        case (segment ids all 0). ValueError if nothing is given.
        """
        if mask_info is not None:
            return mask_info
        if attention_mask is not None:
            return cls.from_attention_mask(attention_mask)
        for name, value in (("input_ids", input_ids), ("inputs_embeds", inputs_embeds)):
            if value is not None:
                if not is_array(value) or value.ndim < 2:
                    raise invalid(name, "an array[batch, length, ...]", value)
                return cls.from_segments(np.zeros(value.shape[:2], np.int32))
        raise ValueError(
            "dynamic_init: give one of mask_info, attention_mask, input_ids, inputs_embeds"
        )
