"""Compressed, selected and sliding branches over blocks of keys."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import NativeSparseAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, F, I


def native_sparse_attention(
    query: F[Array, "batch seq heads head_dim"],
    key: F[Array, "batch seq kv_heads head_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g_cmp: F[Array, "batch seq heads"] | None = None,
    g_slc: F[Array, "batch seq heads"] | None = None,
    block_indices: I[Array, "batch seq kv_heads selected"] | None = None,
    block_counts: int | I[Array, "batch seq kv_heads"] = 16,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    g_swa: F[Array, "batch seq heads"] | None = None,
    block_size: int = 64,
    max_block_count: int | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    platform: str | Platform | None = None,
    cfg: NativeSparseAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array:
    """Causal sparse attention with three gated branches; no ``[seq, seq]`` array is made.

    For token t, counted inside its sequence, and blocks c of ``block_size`` tokens::

        o_cmp: softmax over the mean keys of blocks with (c + 1) * block_size <= t + 1
        o_slc: softmax over the tokens <= t of the selected blocks
        o_swa: softmax over the causal window, only with sliding_window
        out  = g_slc * o_slc + g_cmp * o_cmp + g_swa * o_swa

    Without ``block_indices`` a token's own block is selected first, then blocks by the probability
    that the compressed branch gives them, summed over the query heads of the group; of equal ones
    the lower index. The choice has no gradient.

    Args:
        query: ``[batch, seq, heads, head_dim]``.
        key: ``[batch, seq, kv_heads, head_dim]``; any ``heads // kv_heads``.
        value: ``[batch, seq, kv_heads, v_dim]``.
        g_cmp, g_slc, g_swa: gates ``[batch, seq, heads]``. None: the compressed branch is left
            out; the selected and the sliding one count fully.
        block_indices: ``[batch, seq, kv_heads, selected]`` blocks to read, relative to the
            sequence. Duplicates count once; negative and future ones are ignored.
        block_counts: blocks to select, >= 1, or ``[batch, seq, kv_heads]`` of them.
        cu_seqlens: cumulative lengths of packed sequences; needs batch 1.
        block_size: tokens per block, >= 1.
        max_block_count: static bound of ``block_counts``; larger counts are clipped to it.
            None = all blocks.
        sliding_window: ``w`` or ``(left, right)``; switches the sliding branch on.
        softmax_scale: default ``head_dim ** -0.5``.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        ``[batch, seq, heads, v_dim]`` in the query's dtype.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range, or ``g_swa`` without ``sliding_window``.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value and all gates.

    Source: Yuan et al. 2025, "Native Sparse Attention" (arXiv 2502.11089), section 3.
    """
    return get_default_executor()(NativeSparseAttention.shared(), **flatten(locals()))


class NativeSparseAttention(Operation[NativeSparseAttentionConfig]):
    spec = calls.NativeSparseAttention
    function = staticmethod(native_sparse_attention)
