"""Attention over the blocks a pattern allows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import BlockSparseAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.words import Array, AttentionMask, B, F, I, Key


def blocksparse_attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    *,
    block_mask: B[Array, "#batch #heads q_blocks kv_blocks"]
    | B[Array, "q_blocks kv_blocks"]
    | None = None,
    mask_builder: Callable[[int, int, int], Array] | None = None,
    q_block_size: int = 128,
    kv_block_size: int = 128,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    return_lse: bool = False,
    platform: str | Platform | None = None,
    cfg: BlockSparseAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """:func:`flash_attention` with one more constraint: the key's block must be allowed.

    Row i sees key j only if ``block_mask[.., i // q_block_size, j // kv_block_size]``. Blocks
    that are empty under all constraints together are skipped, forward and backward.

    Args:
        query, key, value, softmax_aux, bias: as in :func:`flash_attention`.
        mask_info, attention_mask: as in :func:`flash_attention`.
        causal, causal_offset, sliding_window: as in :func:`flash_attention`.
        logits_soft_cap, softmax_scale, dropout_prob, dropout_seed: as in :func:`flash_attention`.
        return_lse, platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.
        block_mask: ``[1 or batch, 1 or heads, q_blocks, kv_blocks]`` or
            ``[q_blocks, kv_blocks]``, with ``q_blocks = ceil(q_len / q_block_size)``; any pattern,
            may be traced; None = all blocks.
        mask_builder: ``mask_builder(q_len, kv_len, heads)`` returns such a block mask.
        q_block_size, kv_block_size: lengths of the pattern's blocks; part of the meaning, and
            independent of the tiles in ``cfg``.
        chunk_size: row ``i + causal_offset`` and key j must lie in the same chunk of this length.

    Returns:
        ``[batch, q_len, heads, v_dim]`` in the query's dtype; with ``return_lse`` also
        ``[batch, q_len, heads]`` in float32 (float64 for float64 inputs).

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range, or both ``block_mask`` and ``mask_builder``.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value, softmax_aux and bias.

    Source: Child et al. 2019, "Sparse Transformers" (arXiv 1904.10509); Dao et al. 2022
    (arXiv 2205.14135), section 3.3.
    """
    return get_default_executor()(BlockSparseAttention.shared(), **flatten(locals()))


class BlockSparseAttention(Operation[BlockSparseAttentionConfig]):
    spec = calls.BlockSparseAttention
    function = staticmethod(blocksparse_attention)
