"""MaskInfo: the description of an attention mask."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ejkernel.types.arrays import AnyArray, static_int, static_length
from ejkernel.types.errors import invalid
from ejkernel.types.masks import apply, convert, sharding, summary
from ejkernel.types.masks.apply import intersect
from ejkernel.types.masks.constructors import Constructors
from ejkernel.types.masks.fields import (
    NO_RULE,
    Lengths,
    MaskFields,
    join_terms,
    lengths_of,
    register,
    with_private,
)
from ejkernel.types.masks.rules import MAX_DISTANCE, Rule, window_tuple
from ejkernel.types.masks.segments import segment_ids_to_cu_seqlens
from ejkernel.types.masks.sharding import MaskSharding
from ejkernel.types.masks.summary import BlockSummary
from ejkernel.types.mod_blocks import block_states, dense_pairs
from ejkernel.types.mods import MASK, Mod, trace_mod


def _offset(offset: int) -> int:
    return static_int(offset, "offset", low=-MAX_DISTANCE, high=MAX_DISTANCE)


@register
class MaskInfo(Constructors):
    """An attention mask as a description; a dense boolean mask exists only if one was given.

    A query i sees a key j iff all constraints that are set hold::

        attention_mask[b, h, i, j]
        q_segment_ids[b, i] == kv_segment_ids[b, j] >= 0
        causal:          pos_k[j] <= pos_q[i] + causal_offset
        sliding_window:  pos_q[i] + causal_offset - left <= pos_k[j] <= ... + right
        chunk_size c:    (pos_q[i] + causal_offset) // c == pos_k[j] // c

    pos_q and pos_k are ``q_positions`` and ``kv_positions`` where given, else the array index.
    Masks that no single set of fields can say are joined by ``&`` (``terms``).

    Args:
        attention_mask: bool or integer ``[#batch, #heads, q_len, kv_len]``, nonzero = visible.
        q_segment_ids, kv_segment_ids: int ``[#batch, len]``, negative = padding; both or neither.
        q_positions, kv_positions: int ``[#batch, len]``; as ids, stored as int32: wider values
            are refused in numpy and concrete jax arrays, traced ones lose their high 32 bits.
        causal, causal_offset, chunk_size: static.
        sliding_window: static; an integer w means ``(w, w)``.
        batch_axis_name, qheads_axis_name: mesh axes that ``get_shardings`` uses; None, a name or
            a tuple of names.
        kvheads_axis_name, sequence_axis_name: the same.

    Raises:
        InvalidArgument: a wrong dtype, rank or size.
        ValueError: a negative window, a chunk below 1, segment ids on one side only, or ids and
            positions that int32 does not hold.

    Immutable, and a pytree: arrays are leaves, all other fields are static.
    """

    __slots__ = ()
    __module__ = "ejkernel.types.mask_info"
    """Its name in keys of stored configs, in recorded calls and in pickles; stays."""

    @staticmethod
    def from_mask_mod(
        mask_mod: Callable[..., Any],
        q_len: int,
        kv_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        block_size: int = 128,
    ) -> MaskInfo:
        """The mask of ``mask_mod(b, h, q, k) -> bool``, with the blocks that it leaves visible.

        Every pair is evaluated once, here, a chunk at a time; calls of ``flash_attention`` then
        skip the hidden blocks and evaluate the function in blocks that are neither hidden nor
        full. Other operations, and the methods of the mask that look at pairs, make a dense mask
        of it.

        mask_mod: a function of int32 scalars; it may index arrays that it closes over.
        batch, heads: how many there are, if the function depends on ``b`` or ``h``.
        block_size: rows and keys of a block; a multiple of a kernel's tiles skips most.

        Raises:
            InvalidArgument: no such function, or one that captures traced arrays.
        """
        sizes = (static_length(q_len, "q_len"), static_length(kv_len, "kv_len"))
        counts = [static_int(n, name, low=1) for n, name in ((batch, "batch"), (heads, "heads"))]
        size, mod = static_int(block_size, "block_size", low=1), trace_mod(MASK, mask_mod)
        if any(isinstance(x, Tracer) for x in mod.arrays):
            legal = "a function that captures no traced array: its blocks are found here"
            raise invalid("mask_mod", legal, "a captured tracer")
        options = dict(zip(("batch", "heads"), counts, strict=True), block_size=size)
        mod = Mod(mod.program, mod.arrays, None, block_states(mod, *sizes, **options), size)
        return ModMaskInfo.from_parts(MaskInfo(), mod, Lengths(*counts, *sizes))

    # shape

    @property
    def batch_size(self) -> int | None:
        """Batch axis of the array fields (1 if all of them are shared); None without arrays."""
        return lengths_of(self).batch

    @property
    def q_len(self) -> int | None:
        """Query length from the array fields; None if purely structural."""
        return lengths_of(self).q

    @property
    def kv_len(self) -> int | None:
        """Key length from the array fields; None if purely structural."""
        return lengths_of(self).kv

    @property
    def shape(self) -> Lengths:
        """Named tuple ``(batch, heads, q, kv)``, None for what no array field says."""
        return lengths_of(self)

    @property
    def is_structural(self) -> bool:
        """True if there is no dense mask."""
        return all(term.attention_mask is None for term in self.terms)

    def is_self_attention(self) -> bool:
        """True if queries and keys are the same tokens, judged by structure, not by values.

        Key ids and positions must be the same objects as the queries' ids and positions, or
        absent, and the lengths equal.
        """
        return self.q_len == self.kv_len and all(
            term.q_segment_ids is term.kv_segment_ids and term.q_positions is term.kv_positions
            for term in self.terms
        )

    # dense forms

    def get_or_compute_attention_mask(
        self, dtype: Any = bool, q_len: int | None = None, kv_len: int | None = None
    ) -> AnyArray:
        """Dense ``[b, 1|h, q, k]`` of all constraints in ``dtype`` (1 = visible).

        ValueError if a length is neither given nor known from an array.
        """
        return convert.dense_mask(self, q_len, kv_len).astype(dtype)

    def materialize_attention_mask(
        self, dtype: Any = bool, *, q_len: int | None = None, kv_len: int | None = None
    ) -> MaskInfo:
        """Returns this mask as one dense ``attention_mask``; causal, window and chunk are cleared.

        Segment ids and positions stay (the dense mask already holds what they say).
        """
        dense = self.get_or_compute_attention_mask(dtype, q_len, kv_len)
        return with_private(self, attention_mask=dense, _and=(), _broadcast=False, **NO_RULE)

    def create_bias(
        self, dtype: Any = np.float32, *, q_len: int | None = None, kv_len: int | None = None
    ) -> AnyArray:
        """Additive ``[b, 1|h, q, k]``: 0 where visible, ``finfo(dtype).min`` elsewhere.

        ValueError if a length is neither given nor known from an array.
        """
        return convert.mask_to_bias(convert.dense_mask(self, q_len, kv_len), dtype)

    @property
    def bias(self) -> AnyArray:
        """``create_bias(float32)``."""
        return self.create_bias()

    def to_dtype(self, dtype: Any) -> MaskInfo:
        """The dense mask recast (1 = visible, 0 = hidden); ids and positions are unchanged."""

        def recast(term: MaskInfo) -> MaskInfo:
            return with_private(term, attention_mask=convert.recast(term.attention_mask, dtype))

        return join_terms([recast(term) for term in self.terms])

    # segments, padding, positions

    def get_or_compute_segment_ids(self, per_head: bool = False) -> tuple[AnyArray, AnyArray]:
        """Returns ``(q_ids, kv_ids)`` int32: the stored ids, else ids of the dense mask.

        ``[b, q]`` and ``[b, k]``, with ``per_head`` ``[b, h, q]`` and ``[b, h, k]``. From a dense
        mask as mask_to_segment_ids says.
        """
        return convert.read_segment_ids(self, per_head)

    def materialize_segment_ids(self, per_head: bool = False) -> MaskInfo:
        """With segment ids filled from the mask, which is kept.

        Means the same mask iff that was a segment mask. ``per_head`` stores ``[b, h, len]``.
        """
        if self.q_segment_ids is not None and not per_head:
            return self
        q, kv = convert.read_segment_ids(self, per_head)
        return with_private(self, q_segment_ids=q, kv_segment_ids=kv)

    def get_or_compute_positions(self) -> tuple[AnyArray, AnyArray]:
        """``(q_positions, kv_positions)`` int32 ``[b, len]``.

        Given ones, else restarting with each run of equal ids, else the array index. Padding is
        -1 for queries and 2**31-1 for keys.
        """
        return convert.read_positions(self, "q"), convert.read_positions(self, "kv")

    @property
    def q_position_ids(self) -> AnyArray:
        """Query positions int32 ``[b, q]``, padding -1."""
        return convert.read_positions(self, "q")

    def get_or_compute_qkv_cu_seqlens(
        self, *, max_segments: int | None = None, out_dtype: Any = np.int32
    ) -> tuple[AnyArray, AnyArray]:
        """``(cu_q, cu_kv)`` ``[b, max_segments+1]`` of the maximal runs of equal ids >= 0.

        As segment_ids_to_cu_seqlens; ``max_segments=None`` means the length of the axis.
        """
        q, kv = convert.read_segment_ids(self)
        cu_q = segment_ids_to_cu_seqlens(q, max_segments).astype(out_dtype)
        return cu_q, (
            cu_q if kv is q else segment_ids_to_cu_seqlens(kv, max_segments).astype(out_dtype)
        )

    @property
    def cu_seqlens_q(self) -> AnyArray:
        """Cumulative query lengths int32 ``[b, q_len+1]``."""
        return segment_ids_to_cu_seqlens(convert.read_segment_ids(self)[0])

    @property
    def cu_seqlens_kv(self) -> AnyArray:
        """Cumulative key lengths int32 ``[b, kv_len+1]``."""
        return segment_ids_to_cu_seqlens(convert.read_segment_ids(self)[1])

    @property
    def q_attention_mask(self) -> AnyArray:
        """Queries that are not padding, bool ``[b, q]``."""
        return convert.padding_mask(self, "q")

    @property
    def kv_attention_mask(self) -> AnyArray:
        """Keys that are not padding, bool ``[b, k]``."""
        return convert.padding_mask(self, "kv")

    def get_qkv_masks(self, dtype: Any = bool) -> tuple[AnyArray, AnyArray, AnyArray]:
        """``(q_attention_mask, kv_attention_mask, dense mask)`` in ``dtype``."""
        q, kv = self.q_attention_mask.astype(dtype), self.kv_attention_mask.astype(dtype)
        return q, kv, self.get_or_compute_attention_mask(dtype)

    @property
    def q_lens(self) -> AnyArray:
        """Number of queries that are not padding, int32 ``[b]``."""
        return self.q_attention_mask.sum(-1).astype(np.int32)

    @property
    def kv_lens(self) -> AnyArray:
        """Number of keys that are not padding, int32 ``[b]``."""
        return self.kv_attention_mask.sum(-1).astype(np.int32)

    # one more constraint

    def __and__(self, other: Any) -> MaskInfo:
        """Visible where both masks are. Stays structural and keeps the axis names of ``self``."""
        return intersect(self, other) if isinstance(other, MaskInfo) else NotImplemented

    def apply_causal(self, offset: int = 0) -> MaskInfo:
        """AND ``pos_k <= pos_q + offset``.

        Stays structural unless another offset is stored: then the constraint goes into
        ``attention_mask``, and a mask without known lengths raises ValueError.
        """
        return apply.apply_rule(self, Rule(causal=True, offset=_offset(offset)))

    def apply_sliding_window(self, window: int | tuple[int, int], *, offset: int = 0) -> MaskInfo:
        """AND a window around ``pos_q + offset``; windows intersect. As ``apply_causal``."""
        pair = window_tuple(window, "window")
        if pair is None:
            raise invalid("window", "an int or a tuple (left, right)", None)
        return apply.apply_rule(self, Rule(offset=_offset(offset), window=pair))

    def apply_chunked(self, chunk_size: int, offset: int = 0) -> MaskInfo:
        """AND causal and "same chunk of ``chunk_size`` positions". As ``apply_causal``."""
        chunk = static_int(chunk_size, "chunk_size", low=1)
        return apply.apply_rule(self, Rule(causal=True, offset=_offset(offset), chunk=chunk))

    def apply_kv_lengths(
        self, kv_lengths: Any, *, q_len: int | None = None, end_index: Any = None
    ) -> MaskInfo:
        """Hide keys ``j >= kv_lengths[b]`` (array index; int ``[b]`` or a scalar).

        With ``q_len`` only the ``q_len`` query rows that end at ``end_index`` (default
        kv_lengths; exclusive) are kept, with the positions they had; rows outside the mask see
        nothing. Stays structural. ValueError if the key length is not known.
        """
        return apply.apply_kv_lengths(self, kv_lengths, q_len, end_index)

    def apply_token_type_ids(
        self,
        token_type_ids: Any,
        *,
        combine: Literal["union", "intersect", "replace"] = "union",
        zero_policy: Literal["q", "kv", "both", "none"] = "both",
    ) -> MaskInfo:
        """Join the mask with the pairs of equal token type; the result is dense.

        token_type_ids: int ``[#b, s]`` or a pair ``([#b, q], [#b, k])``. ``zero_policy`` says
        whose type 0 makes no pair. Segment ids are folded into the dense mask.
        """
        return apply.apply_token_type_ids(self, token_type_ids, combine, zero_policy)

    @staticmethod
    def create_chunked_attention_mask(
        chunk_size: int, q_len: int, kv_len: int | None = None, offset: int = 0, dtype: Any = bool
    ) -> np.ndarray:
        """Dense ``[q, k]``: causal, and ``(i + offset) // chunk_size == j // chunk_size``."""
        return apply.chunked_attention_mask(chunk_size, q_len, kv_len, offset, dtype)

    # placement and display

    def get_shardings(self, sequence_parallel: bool = False, *, mesh: Any) -> MaskSharding:
        """PartitionSpecs by the axis names; names that ``mesh`` lacks are ignored.

        ``sequence_parallel`` also splits the sequence axes (of a dense mask the query axis).
        Absent fields get None; axes of size 1 are replicated.
        """
        return sharding.mask_shardings(self, sequence_parallel, mesh)

    def get_empty_sharding(self) -> MaskSharding:
        """Every present array replicated, absent fields None."""
        return sharding.empty_sharding(self)

    def block_summary(
        self, q_block: int, kv_block: int, *, q_len: int | None = None, kv_len: int | None = None
    ) -> BlockSummary:
        """Empty, partial and full blocks, and the ranges to visit. See BlockSummary.

        numpy if every array is known, else traced. O(nq*nk) memory without a dense mask.
        """
        return summary.block_summary(self, q_block, kv_block, q_len, kv_len)

    def visualize(
        self,
        block_size: int = 32,
        batch: int = 0,
        head: int = 0,
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
        charset: Literal["unicode", "ascii"] = "unicode",
        return_str: bool = False,
    ) -> str | None:
        """Print a block map of one batch row and head, or return it with ``return_str``."""
        text = summary.block_map(self, block_size, batch, head, q_len, kv_len, charset)
        if return_str:
            return text
        print(text)
        return None


@jtu.register_pytree_with_keys_class
class ModMaskInfo(MaskInfo):
    """A mask of fields, ``plain``, and of a traced ``mask_mod``; ``from_mask_mod`` makes it.

    Calls take the two apart (``calls.values``), so that kernels get masks of fields alone.
    """

    __slots__ = ("__dict__", "mask_mod", "plain", "sizes")
    __module__ = "ejkernel.types.mask_info"

    plain: MaskInfo
    mask_mod: Mod
    sizes: Lengths

    @classmethod
    def from_parts(cls, plain: MaskInfo, mask_mod: Mod, sizes: Lengths) -> ModMaskInfo:
        """Returns the mask of both; ``sizes``: the lengths that the blocks were found for."""
        new = object.__new__(cls)
        fields = {name: getattr(plain, name) for name in MaskFields.__slots__}
        new._store(fields | {"plain": plain, "mask_mod": mask_mod, "sizes": sizes})
        return new

    def tree_flatten_with_keys(self) -> tuple[tuple, tuple]:
        children = ((jtu.GetAttrKey(name), getattr(self, name)) for name in ("plain", "mask_mod"))
        return tuple(children), tuple(self.sizes)

    @classmethod
    def tree_unflatten(cls, static: tuple, children: tuple) -> ModMaskInfo:
        plain, mask_mod = children
        if not isinstance(plain, MaskInfo):  # JAX puts arbitrary objects in the place of parts
            new = object.__new__(cls)
            new._store({"plain": plain, "mask_mod": mask_mod, "sizes": Lengths(*static)})
            return new
        return cls.from_parts(plain, mask_mod, Lengths(*static))

    @cached_property
    def dense(self) -> MaskInfo:
        """The same mask with the function's pairs as an array."""
        pairs = dense_pairs(self.mask_mod, self.sizes)
        return self.plain & MaskInfo(attention_mask=pairs)

    def __repr__(self) -> str:
        return f"{self.plain!r} & {self.mask_mod!r}"

    def __reduce__(self):
        return type(self.dense).__reduce__(self.dense)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, ModMaskInfo):
            return self is other
        mine, theirs = self.mask_mod, other.mask_mod
        same = mine.program == theirs.program and self.sizes == other.sizes
        arrays = zip(mine.arrays, theirs.arrays, strict=True) if same else ()
        return same and self.plain == other.plain and all(a is b for a, b in arrays)

    def __hash__(self) -> int:
        return hash((self.plain, self.mask_mod.program, self.sizes))

    def __and__(self, other: Any) -> MaskInfo:
        if isinstance(other, ModMaskInfo):
            return self & other.dense
        if not isinstance(other, MaskInfo):
            return NotImplemented
        return self._with_plain(self.plain & other)

    def __rand__(self, other: Any) -> MaskInfo:
        if not isinstance(other, MaskInfo):
            return NotImplemented
        return self._with_plain(other & self.plain)

    def _with_plain(self, plain: MaskInfo) -> ModMaskInfo:
        return self.from_parts(plain, self.mask_mod, self.sizes)

    def apply_causal(self, offset: int = 0) -> MaskInfo:
        return self._with_plain(self.plain.apply_causal(offset))

    def apply_sliding_window(self, window: int | tuple[int, int], *, offset: int = 0) -> MaskInfo:
        return self._with_plain(self.plain.apply_sliding_window(window, offset=offset))

    def apply_chunked(self, chunk_size: int, offset: int = 0) -> MaskInfo:
        return self._with_plain(self.plain.apply_chunked(chunk_size, offset))

    @property
    def terms(self) -> Any:
        """Nobody reads the fields of this mask alone: they are not all of it."""
        legal = "a mask of fields: materialize_attention_mask() makes one of a mask_mod"
        raise invalid("mask_info", legal, repr(self))

    @property
    def shape(self) -> Lengths:
        return self.sizes

    @property
    def batch_size(self) -> int | None:
        return self.sizes.batch

    @property
    def q_len(self) -> int | None:
        return self.sizes.q

    @property
    def kv_len(self) -> int | None:
        return self.sizes.kv


def _ask_dense(name: str, member: Any) -> Any:
    """Returns a member of MaskInfo that a ModMaskInfo asks its dense form."""
    if isinstance(member, property):
        return property(lambda self: getattr(self.dense, name), doc=member.__doc__)

    @functools.wraps(member)
    def method(self: ModMaskInfo, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.dense, name)(*args, **kwargs)

    return method


for _name, _member in {**vars(MaskFields), **vars(MaskInfo)}.items():
    _reads_pairs = isinstance(_member, (property, types.FunctionType))
    if _reads_pairs and not _name.startswith("_") and _name not in vars(ModMaskInfo):
        setattr(ModMaskInfo, _name, _ask_dense(_name, _member))
