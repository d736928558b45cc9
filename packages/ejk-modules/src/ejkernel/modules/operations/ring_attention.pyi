# Made from ring_attention.py by tools/stubs.py --write.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ejkernel.modules._configs import RingAttentionConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types import MaskInfo
from ejkernel.types.calls.words import Array, F, I, Key

@overload
def ring_attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_total"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    axis_name: str,
    mask_info: MaskInfo | None = None,
    q_segment_ids: I[Array, "#batch q_len"] | None = None,
    kv_segment_ids: I[Array, "#batch kv_len"] | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    return_lse: Literal[False] = False,
    precision: jax.lax.PrecisionLike = None,
    logits_dtype: DTypeLike = jnp.float32,
    platform: str | Platform | None = None,
    cfg: RingAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array: ...
@overload
def ring_attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_total"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    axis_name: str,
    mask_info: MaskInfo | None = None,
    q_segment_ids: I[Array, "#batch q_len"] | None = None,
    kv_segment_ids: I[Array, "#batch kv_len"] | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    return_lse: Literal[True],
    precision: jax.lax.PrecisionLike = None,
    logits_dtype: DTypeLike = jnp.float32,
    platform: str | Platform | None = None,
    cfg: RingAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ring_attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_total"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    axis_name: str,
    mask_info: MaskInfo | None = None,
    q_segment_ids: I[Array, "#batch q_len"] | None = None,
    kv_segment_ids: I[Array, "#batch kv_len"] | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    return_lse: bool,
    precision: jax.lax.PrecisionLike = None,
    logits_dtype: DTypeLike = jnp.float32,
    platform: str | Platform | None = None,
    cfg: RingAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def zigzag_shard(x: Array, axis_size: int, axis: int = 1) -> jax.Array: ...
def zigzag_unshard(x: Array, axis_size: int, axis: int = 1) -> jax.Array: ...

class RingAttention(Operation[RingAttentionConfig]): ...
