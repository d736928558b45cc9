# Made by tools/stubs.py --write.
# ruff: noqa
# fmt: off
import jax
import jax.numpy as jnp
from collections.abc import Callable
from ejkernel.types import MaskInfo
from ejkernel.types.calls.words import Array, AttentionMask, B, Cache, F, Flags, I, Key, Quantized, Weights
from ejkernel.types.serving.plan import AttentionPlan
from jax.typing import DTypeLike
from typing import Any, Literal, overload
from ejkernel.kernels.triton._version import __version__ as __version__
from ejkernel.ops.packages import KernelPackage

PACKAGE: KernelPackage

def register(registry: Any) -> None: ...
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
    cfg: Any = None,
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
    cfg: Any = None,
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
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
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
    cfg: Any = None,
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
    cfg: Any = None,
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
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def scaled_dot_product_attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    cum_seqlens_q: I[Array, " sequences_plus_1"] | None = None,
    cum_seqlens_k: I[Array, " sequences_plus_1"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    init_bias: Callable[[], Array] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    cfg: Any = None,
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
    return_lse: Literal[False] = False,
    cfg: Any = None,
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
    cfg: Any = None,
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
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
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
    cfg: Any = None,
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
    cfg: Any = None,
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
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@overload
def page_attention(
    query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
    key_cache: Cache[Array, "pages page_size kv_heads head_dim"],
    value_cache: Cache[Array, "pages page_size kv_heads v_dim"],
    context_lens: I[Array, " batch"],
    block_tables: I[Array, "batch max_blocks"],
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    num_splits: int | None = None,
    return_lse: Literal[False] = False,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def page_attention(
    query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
    key_cache: Cache[Array, "pages page_size kv_heads head_dim"],
    value_cache: Cache[Array, "pages page_size kv_heads v_dim"],
    context_lens: I[Array, " batch"],
    block_tables: I[Array, "batch max_blocks"],
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    num_splits: int | None = None,
    return_lse: Literal[True],
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def page_attention(
    query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
    key_cache: Cache[Array, "pages page_size kv_heads head_dim"],
    value_cache: Cache[Array, "pages page_size kv_heads v_dim"],
    context_lens: I[Array, " batch"],
    block_tables: I[Array, "batch max_blocks"],
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    num_splits: int | None = None,
    return_lse: bool,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@overload
def ragged_page_attention(
    queries: F[Array, "tokens heads head_dim"],
    kv_pages: Cache[Array, "pages page_size combined_kv_heads head_dim"],
    context_lens: I[Array, " sequences"],
    block_tables: I[Array, "sequences max_blocks"],
    query_start_loc: I[Array, " sequences_plus_1"],
    num_seqs: int | I[Array, ""] | I[Array, "1"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    tree_mask: B[Array, "tokens max_new"] | None = None,
    positions: I[Array, " tokens"] | None = None,
    return_lse: Literal[False] = False,
    plan: AttentionPlan | None = None,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def ragged_page_attention(
    queries: F[Array, "tokens heads head_dim"],
    kv_pages: Cache[Array, "pages page_size combined_kv_heads head_dim"],
    context_lens: I[Array, " sequences"],
    block_tables: I[Array, "sequences max_blocks"],
    query_start_loc: I[Array, " sequences_plus_1"],
    num_seqs: int | I[Array, ""] | I[Array, "1"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    tree_mask: B[Array, "tokens max_new"] | None = None,
    positions: I[Array, " tokens"] | None = None,
    return_lse: Literal[True],
    plan: AttentionPlan | None = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ragged_page_attention(
    queries: F[Array, "tokens heads head_dim"],
    kv_pages: Cache[Array, "pages page_size combined_kv_heads head_dim"],
    context_lens: I[Array, " sequences"],
    block_tables: I[Array, "sequences max_blocks"],
    query_start_loc: I[Array, " sequences_plus_1"],
    num_seqs: int | I[Array, ""] | I[Array, "1"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    tree_mask: B[Array, "tokens max_new"] | None = None,
    positions: I[Array, " tokens"] | None = None,
    return_lse: bool,
    plan: AttentionPlan | None = None,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@overload
def ragged_page_attention_v3(
    queries: F[Array, "tokens heads head_dim"],
    keys: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
    values: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
    kv_cache: Cache[Array, "pages page_size combined_kv_heads head_dim"]
    | Cache[Array, "pages page_size packed_kv_heads packing padded_head_dim"],
    kv_lens: I[Array, " sequences"],
    block_tables: I[Array, "sequences max_blocks"] | I[Array, " table_entries"],
    query_start_loc: I[Array, " sequences_plus_1"],
    distribution: I[Array, "3"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | F[Array, ""] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    tree_mask: B[Array, "tokens max_new"] | None = None,
    positions: I[Array, " tokens"] | None = None,
    return_lse: Literal[False] = False,
    plan: AttentionPlan | None = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ragged_page_attention_v3(
    queries: F[Array, "tokens heads head_dim"],
    keys: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
    values: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
    kv_cache: Cache[Array, "pages page_size combined_kv_heads head_dim"]
    | Cache[Array, "pages page_size packed_kv_heads packing padded_head_dim"],
    kv_lens: I[Array, " sequences"],
    block_tables: I[Array, "sequences max_blocks"] | I[Array, " table_entries"],
    query_start_loc: I[Array, " sequences_plus_1"],
    distribution: I[Array, "3"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | F[Array, ""] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    tree_mask: B[Array, "tokens max_new"] | None = None,
    positions: I[Array, " tokens"] | None = None,
    return_lse: Literal[True],
    plan: AttentionPlan | None = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def ragged_page_attention_v3(
    queries: F[Array, "tokens heads head_dim"],
    keys: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
    values: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
    kv_cache: Cache[Array, "pages page_size combined_kv_heads head_dim"]
    | Cache[Array, "pages page_size packed_kv_heads packing padded_head_dim"],
    kv_lens: I[Array, " sequences"],
    block_tables: I[Array, "sequences max_blocks"] | I[Array, " table_entries"],
    query_start_loc: I[Array, " sequences_plus_1"],
    distribution: I[Array, "3"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | F[Array, ""] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    tree_mask: B[Array, "tokens max_new"] | None = None,
    positions: I[Array, " tokens"] | None = None,
    return_lse: bool,
    plan: AttentionPlan | None = None,
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def ragged_decode_attention(
    query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    sequence_start: I[Array, " batch"],
    sequence_end: I[Array, " batch"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: Literal[False] = False,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def ragged_decode_attention(
    query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    sequence_start: I[Array, " batch"],
    sequence_end: I[Array, " batch"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: Literal[True],
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ragged_decode_attention(
    query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    sequence_start: I[Array, " batch"],
    sequence_end: I[Array, " batch"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
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
    cfg: Any = None,
) -> jax.Array: ...
@overload
def mla_decode(
    query: F[Array, "batch heads cache_dim"] | F[Array, "batch q_len heads cache_dim"],
    latent_cache: Cache[Array, "pages page_size cache_dim"],
    context_lens: I[Array, " batch"],
    block_tables: I[Array, "batch max_blocks"],
    *,
    latent_dim: int = 512,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    k_scale: float | F[Array, ""] | None = None,
    num_splits: int | None = None,
    tree_mask: B[Array, "batch q_len q_len"] | None = None,
    positions: I[Array, "batch q_len"] | None = None,
    return_lse: Literal[False] = False,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def mla_decode(
    query: F[Array, "batch heads cache_dim"] | F[Array, "batch q_len heads cache_dim"],
    latent_cache: Cache[Array, "pages page_size cache_dim"],
    context_lens: I[Array, " batch"],
    block_tables: I[Array, "batch max_blocks"],
    *,
    latent_dim: int = 512,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    k_scale: float | F[Array, ""] | None = None,
    num_splits: int | None = None,
    tree_mask: B[Array, "batch q_len q_len"] | None = None,
    positions: I[Array, "batch q_len"] | None = None,
    return_lse: Literal[True],
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def mla_decode(
    query: F[Array, "batch heads cache_dim"] | F[Array, "batch q_len heads cache_dim"],
    latent_cache: Cache[Array, "pages page_size cache_dim"],
    context_lens: I[Array, " batch"],
    block_tables: I[Array, "batch max_blocks"],
    *,
    latent_dim: int = 512,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    k_scale: float | F[Array, ""] | None = None,
    num_splits: int | None = None,
    tree_mask: B[Array, "batch q_len q_len"] | None = None,
    positions: I[Array, "batch q_len"] | None = None,
    return_lse: bool,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def grouped_matmul(
    lhs: F[Array, "rows inner"],
    rhs: Weights[Array, "groups _ _"],
    group_sizes: I[Array, " all_groups"],
    group_offset: int | I[Array, ""] | I[Array, "1"] | None = None,
    existing_out: F[Array, "rows columns"] | None = None,
    *,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    precision: jax.lax.PrecisionLike = None,
    rhs_scale: float
    | F[Array, ""]
    | F[Array, " groups"]
    | F[Array, "groups columns"]
    | None = None,
    cfg: Any = None,
) -> jax.Array: ...
def mean_pooling(
    x: F[Array, "batch seq *channels"] | F[Array, " tokens *channels"],
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    chunk_size: int | None = None,
    attention_mask: Flags[Array, "batch seq"] | Flags[Array, " tokens"] | None = None,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def gated_delta_rule(
    query: F[Array, "batch seq kv_heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq heads v_dim"],
    g: F[Array, "batch seq heads"] | F[Array, "batch seq heads key_dim"] | None = None,
    beta: F[Array, "batch seq heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    normalize_qk: bool = False,
    reverse: bool = False,
    return_state: Literal[False] = False,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def gated_delta_rule(
    query: F[Array, "batch seq kv_heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq heads v_dim"],
    g: F[Array, "batch seq heads"] | F[Array, "batch seq heads key_dim"] | None = None,
    beta: F[Array, "batch seq heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    normalize_qk: bool = False,
    reverse: bool = False,
    return_state: Literal[True],
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def gated_delta_rule(
    query: F[Array, "batch seq kv_heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq heads v_dim"],
    g: F[Array, "batch seq heads"] | F[Array, "batch seq heads key_dim"] | None = None,
    beta: F[Array, "batch seq heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    normalize_qk: bool = False,
    reverse: bool = False,
    return_state: bool,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@overload
def causal_conv1d(
    x: F[Array, "batch seq channels"],
    weight: F[Array, "channels width"],
    bias: F[Array, " channels"] | None = None,
    initial_state: F[Array, "states channels history"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    activation: Literal["silu"] | None = None,
    return_state: Literal[False] = False,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def causal_conv1d(
    x: F[Array, "batch seq channels"],
    weight: F[Array, "channels width"],
    bias: F[Array, " channels"] | None = None,
    initial_state: F[Array, "states channels history"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    activation: Literal["silu"] | None = None,
    return_state: Literal[True],
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def causal_conv1d(
    x: F[Array, "batch seq channels"],
    weight: F[Array, "channels width"],
    bias: F[Array, " channels"] | None = None,
    initial_state: F[Array, "states channels history"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    activation: Literal["silu"] | None = None,
    return_state: bool,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@overload
def recurrent_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
    g_gamma: F[Array, " heads"] | None = None,
    gk: F[Array, "batch seq heads key_dim"] | None = None,
    gv: F[Array, "batch seq heads v_dim"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[False] = False,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def recurrent_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
    g_gamma: F[Array, " heads"] | None = None,
    gk: F[Array, "batch seq heads key_dim"] | None = None,
    gv: F[Array, "batch seq heads v_dim"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[True],
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def recurrent_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
    g_gamma: F[Array, " heads"] | None = None,
    gk: F[Array, "batch seq heads key_dim"] | None = None,
    gv: F[Array, "batch seq heads v_dim"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@overload
def gla_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
    g_gamma: F[Array, " heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[False] = False,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def gla_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
    g_gamma: F[Array, " heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[True],
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def gla_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
    g_gamma: F[Array, " heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@overload
def lightning_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[False] = False,
    cfg: Any = None,
) -> jax.Array: ...
@overload
def lightning_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: Literal[True],
    cfg: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def lightning_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
