# Made from ragged_decode_attention.py by tools/stubs.py --write.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import RaggedDecodeAttentionConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types.calls.words import Array, F, I

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
    platform: str | Platform | None = None,
    cfg: RaggedDecodeAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
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
    platform: str | Platform | None = None,
    cfg: RaggedDecodeAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
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
    platform: str | Platform | None = None,
    cfg: RaggedDecodeAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

class RaggedDecodeAttention(Operation[RaggedDecodeAttentionConfig]): ...
