# Made from mla_attention.py by tools/stubs.py --write.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import FlashMLAConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types import MaskInfo
from ejkernel.types.calls.words import Array, AttentionMask, F, I, Key

@overload
def mla_attention(
    query: F[Array, "batch q_len heads q_dim"],
    key_value: F[Array, "batch kv_len latent"],
    w_kc: F[Array, "latent kv_heads nope_dim"],
    w_vc: F[Array, "latent kv_heads v_dim"],
    b_q: F[Array, "batch q_len rope_dim"] | None = None,
    b_k: F[Array, "batch kv_len rope_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    return_lse: Literal[False] = False,
    platform: str | Platform | None = None,
    cfg: FlashMLAConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array: ...
@overload
def mla_attention(
    query: F[Array, "batch q_len heads q_dim"],
    key_value: F[Array, "batch kv_len latent"],
    w_kc: F[Array, "latent kv_heads nope_dim"],
    w_vc: F[Array, "latent kv_heads v_dim"],
    b_q: F[Array, "batch q_len rope_dim"] | None = None,
    b_k: F[Array, "batch kv_len rope_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    return_lse: Literal[True],
    platform: str | Platform | None = None,
    cfg: FlashMLAConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def mla_attention(
    query: F[Array, "batch q_len heads q_dim"],
    key_value: F[Array, "batch kv_len latent"],
    w_kc: F[Array, "latent kv_heads nope_dim"],
    w_vc: F[Array, "latent kv_heads v_dim"],
    b_q: F[Array, "batch q_len rope_dim"] | None = None,
    b_k: F[Array, "batch kv_len rope_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
    return_lse: bool,
    platform: str | Platform | None = None,
    cfg: FlashMLAConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

class FlashMLA(Operation[FlashMLAConfig]): ...
