"""MaskInfo: what an attention mask means."""

from __future__ import annotations

from typing import Any

from ejkernel.types.fields import MaskFields, lengths_of, register, with_private


@register
class MaskInfo(MaskFields):
    """An attention mask as facts; a dense boolean mask exists only if one was given."""

    __slots__ = ()

    @property
    def conjuncts(self) -> tuple[MaskInfo, ...]:
        """The masks whose AND this mask is; each consists of its fields alone."""
        if not self._and:
            return (self,)
        return (with_private(self, _and=()), *self._and)

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
    def shape(self) -> tuple[int | None, int | None, int | None, int | None]:
        """``(batch, heads, q_len, kv_len)``, None for what no array field says."""
        return tuple(lengths_of(self))

    @property
    def is_structural(self) -> bool:
        """True if there is no dense mask."""
        return all(part.attention_mask is None for part in self.conjuncts)

    def __and__(self, other: Any) -> MaskInfo:
        """Visible where both masks are. Stays structural; axis names are those of ``self``."""
        from ejkernel.types.combine import intersect

        return intersect(self, other) if isinstance(other, MaskInfo) else NotImplemented
