# Made from flash_attention.py by tools/stubs.py --write.
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ejkernel.modules._configs import FlashAttentionConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types import MaskInfo
from ejkernel.types.calls.words import Array, AttentionMask, F, I, Key, Quantized

@overload
def flash_attention(
    query: Quantized[Array, "batch q_len heads head_dim"],
    key: Quantized[Array, "batch kv_len kv_heads head_dim"],
    value: Quantized[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
    cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: Literal[False] = False,
    precision: jax.lax.PrecisionLike = None,
    logits_dtype: DTypeLike = jnp.float32,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_scale: float
    | F[Array, ""]
    | F[Array, "#batch #heads"]
    | F[Array, "batch heads q_blocks"]
    | None = None,
    k_scale: float
    | F[Array, ""]
    | F[Array, "#batch #kv_heads"]
    | F[Array, "batch kv_heads kv_blocks"]
    | None = None,
    v_scale: float | F[Array, ""] | F[Array, "#batch #kv_heads"] | None = None,
    out_dtype: DTypeLike | None = None,
    platform: str | Platform | None = None,
    cfg: FlashAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array: ...
@overload
def flash_attention(
    query: Quantized[Array, "batch q_len heads head_dim"],
    key: Quantized[Array, "batch kv_len kv_heads head_dim"],
    value: Quantized[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
    cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: Literal[True],
    precision: jax.lax.PrecisionLike = None,
    logits_dtype: DTypeLike = jnp.float32,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_scale: float
    | F[Array, ""]
    | F[Array, "#batch #heads"]
    | F[Array, "batch heads q_blocks"]
    | None = None,
    k_scale: float
    | F[Array, ""]
    | F[Array, "#batch #kv_heads"]
    | F[Array, "batch kv_heads kv_blocks"]
    | None = None,
    v_scale: float | F[Array, ""] | F[Array, "#batch #kv_heads"] | None = None,
    out_dtype: DTypeLike | None = None,
    platform: str | Platform | None = None,
    cfg: FlashAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def flash_attention(
    query: Quantized[Array, "batch q_len heads head_dim"],
    key: Quantized[Array, "batch kv_len kv_heads head_dim"],
    value: Quantized[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
    cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool,
    precision: jax.lax.PrecisionLike = None,
    logits_dtype: DTypeLike = jnp.float32,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_scale: float
    | F[Array, ""]
    | F[Array, "#batch #heads"]
    | F[Array, "batch heads q_blocks"]
    | None = None,
    k_scale: float
    | F[Array, ""]
    | F[Array, "#batch #kv_heads"]
    | F[Array, "batch kv_heads kv_blocks"]
    | None = None,
    v_scale: float | F[Array, ""] | F[Array, "#batch #kv_heads"] | None = None,
    out_dtype: DTypeLike | None = None,
    platform: str | Platform | None = None,
    cfg: FlashAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

class FlashAttention(Operation[FlashAttentionConfig]): ...
