# Made from ragged_page_attention_v3.py by tools/stubs.py --write.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import RaggedPageAttentionv3Config
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types.calls.words import Array, B, Cache, F, I
from ejkernel.types.serving.plan import AttentionPlan

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
    platform: str | Platform | None = None,
    cfg: RaggedPageAttentionv3Config | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
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
    platform: str | Platform | None = None,
    cfg: RaggedPageAttentionv3Config | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
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
    platform: str | Platform | None = None,
    cfg: RaggedPageAttentionv3Config | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]: ...

class RaggedPageAttentionv3(Operation[RaggedPageAttentionv3Config]): ...
