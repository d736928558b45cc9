# Made from blocksparse_attention.py by tools/stubs.py --write.
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import BlockSparseAttentionConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types import MaskInfo
from ejkernel.types.calls.words import Array, AttentionMask, B, F, I, Key

@overload
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
    return_lse: Literal[False] = False,
    platform: str | Platform | None = None,
    cfg: BlockSparseAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array: ...
@overload
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
    return_lse: Literal[True],
    platform: str | Platform | None = None,
    cfg: BlockSparseAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
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
    return_lse: bool,
    platform: str | Platform | None = None,
    cfg: BlockSparseAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

class BlockSparseAttention(Operation[BlockSparseAttentionConfig]): ...
