# Made from mla_decode.py by tools/stubs.py --write.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import MLADecodeConfig
from ejkernel.modules._op import Operation
from ejkernel.ops import Platform
from ejkernel.types.calls.words import Array, B, Cache, F, I

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
    platform: str | Platform | None = None,
    cfg: MLADecodeConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
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
    platform: str | Platform | None = None,
    cfg: MLADecodeConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
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
    platform: str | Platform | None = None,
    cfg: MLADecodeConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...

class MLADecode(Operation[MLADecodeConfig]): ...
