# Made from page_attention.py by tools/stubs.py --write.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import PageAttentionConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types.calls.words import Array, Cache, F, I

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
    platform: str | Platform | None = None,
    cfg: PageAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
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
    platform: str | Platform | None = None,
    cfg: PageAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
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
    platform: str | Platform | None = None,
    cfg: PageAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

class PageAttention(Operation[PageAttentionConfig]): ...
