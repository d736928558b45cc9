"""Static properties of the selected branch of native sparse attention, and the choice of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype
from ejkernel.types.masks.token_blocks import TokenBlocks, clean_indices


@dataclass(frozen=True)
class SelectedProblem:
    """Static properties of a call of the selected branch.

    Attributes:
        batch, length, heads, kv_heads, dim, value_dim: sizes of q, k and v.
        size: tokens of a block.
        blocks: blocks of one batch row, all its sequences together.
        slots: entries of a token's list of blocks.
        scale: factor of the scores.
        dtype: of q, k, v and the output.
        packed: whether a row may hold several sequences.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    size: int
    blocks: int
    slots: int
    scale: float
    dtype: str
    packed: bool

    @classmethod
    def from_call(cls, p: Any) -> Self:
        """Returns the problem of a call of native sparse attention; ``p`` has its arguments."""
        (b, s, h, d), hk, dv = p.query.shape, p.key.shape[2], p.value.shape[3]
        sequences = 0 if p.cu_seqlens is None else p.cu_seqlens.shape[0] - 1
        longest = -(-s // p.block_size)
        if p.block_indices is not None:
            slots = p.block_indices.shape[3]
        else:
            bound = p.max_block_count if sorts_blocks(p) else p.block_counts
            slots = max(1, longest if bound is None else min(bound, longest))
        return cls(
            b, s, h, hk, d, dv, p.block_size, longest + sequences, slots, float(p.softmax_scale),
            promoted_dtype(p), p.cu_seqlens is not None,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    def folded(self, size: int) -> Self:
        """Returns the problem of ``size`` times as many batch rows."""
        return replace(self, batch=size * self.batch)


def promoted_dtype(p: Any) -> str:
    """Returns the dtype in which a call's query, key and value are attended to."""
    return result_dtype(p.query.dtype, p.key.dtype, p.value.dtype).name


def sorts_blocks(p: Any) -> bool:
    """Returns whether the order of the chosen blocks matters: tokens have different counts."""
    return not isinstance(p.block_counts, int)


def chosen_blocks(
    p: Any, arrays: Mapping[str, Any], blocks: TokenBlocks, select: Callable[[], jax.Array]
) -> jax.Array:
    """Returns every token's blocks ``[b, s, hk, slots]``, each once, -1 where there is none.

    They are the call's ``block_indices``, or what ``select()`` returns, best first, as many as
    ``block_counts`` says.
    """
    counts = arrays.get("block_counts", p.block_counts)
    if p.block_indices is not None:
        if not isinstance(counts, int) and p.max_block_count is not None:
            counts = jnp.minimum(counts, p.max_block_count)
        return clean_indices(arrays["block_indices"], counts, blocks)
    chosen = select()
    if isinstance(counts, int):
        return chosen
    slot = jax.lax.broadcasted_iota(jnp.int32, chosen.shape, chosen.ndim - 1)
    return jnp.where(slot < counts[..., None], chosen, -1)
