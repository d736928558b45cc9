"""One config class per operation: how the work is cut into tiles, never what is computed.

All are frozen, hashable and begin with ``platform`` and ``backend``; ``None`` in a tile field
leaves the choice to the implementation. ``to_dict``, ``from_dict``, ``to_json`` and ``from_json``
round-trip exactly. An illegal value or unknown field is a ConfigError.
"""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.ops import BwdParams, FwdParams
from ejkernel.ops.params import (
    Nested,
    OpConfig,
    bytes_field,
    count_field,
    flag_field,
    params_field,
    stages_field,
    strategy_field,
    tile_field,
    warps_field,
)


@dataclass(frozen=True)
class _ForwardBackwardConfig(OpConfig):
    fwd_params: Nested[FwdParams] = params_field(FwdParams)
    bwd_params: Nested[BwdParams] = params_field(BwdParams)


@dataclass(frozen=True)
class _SharedSequenceConfig(_ForwardBackwardConfig):
    context_parallel: str = strategy_field()


@dataclass(frozen=True)
class FlashAttentionConfig(_SharedSequenceConfig):
    """Tiles of flash_attention: FwdParams forward, BwdParams backward, or mappings of their fields.

    ``context_parallel``: how devices share a sequence, by default "auto". ``joins_heads``: whether
    kernels for TPUs read and write ``[b, s, h * d]``, as a projection leaves it, for head dims in
    multiples of 128; None is False.
    ``fuses_gradients``: whether one kernel for TPUs computes the gradients of queries and of keys;
    None: where vector memory holds the queries.
    """

    joins_heads: bool | None = flag_field()
    fuses_gradients: bool | None = flag_field()


@dataclass(frozen=True)
class RingAttentionConfig(_SharedSequenceConfig):
    """Tiles of ring_attention on each device, and how devices share the sequence."""


@dataclass(frozen=True)
class BlockSparseAttentionConfig(_ForwardBackwardConfig):
    """Tiles of blocksparse_attention; independent of the pattern's block sizes."""


@dataclass(frozen=True)
class RaggedDecodeAttentionConfig(_ForwardBackwardConfig):
    """Tiles of ragged_decode_attention."""


@dataclass(frozen=True)
class FlashMLAConfig(_SharedSequenceConfig):
    """Tiles of mla_attention, and how devices share a sequence."""


@dataclass(frozen=True)
class AttentionConfig(OpConfig):
    """Config of attention, which has no tiles: the platform alone."""


@dataclass(frozen=True)
class ScaledDotProductAttentionConfig(OpConfig):
    """Config of scaled_dot_product_attention, which has no tiles: the platform alone."""


@dataclass(frozen=True)
class _PagedDecodeConfig(OpConfig):
    num_splits: int | None = count_field()
    pages_per_block: int | None = count_field()
    num_warps: int | None = warps_field()
    num_stages: int | None = stages_field()
    num_launches: int | None = count_field()


@dataclass(frozen=True)
class PageAttentionConfig(_PagedDecodeConfig):
    """Tiles of page_attention: parts of the keys that run side by side, and pages per step.

    ``num_launches=1``: where a single sequence's parts are merged by the launch that reads them.
    """


@dataclass(frozen=True)
class MLADecodeConfig(_PagedDecodeConfig):
    """Tiles of mla_decode, by the fields of PageAttentionConfig."""


@dataclass(frozen=True)
class _RaggedPageConfig(OpConfig):
    num_kv_pages_per_block: int | None = count_field()
    num_queries_per_block: int | None = count_field()
    num_splits: int | None = count_field()
    num_warps: int | None = warps_field()
    num_stages: int | None = stages_field()
    vmem_limit_bytes: int | None = bytes_field()


@dataclass(frozen=True)
class RaggedPageAttentionConfig(_RaggedPageConfig):
    """Tiles of ragged_page_attention: query rows and pages per step, and parts of a long sequence.

    ``vmem_limit_bytes``: read by no kernel yet.
    """


@dataclass(frozen=True)
class RaggedPageAttentionv3Config(_RaggedPageConfig):
    """Tiles of ragged_page_attention_v3, by the fields of RaggedPageAttentionConfig."""


@dataclass(frozen=True)
class NativeSparseAttentionConfig(OpConfig):
    """Tiles of native_sparse_attention: rows of queries and keys per step.

    ``block_size``, which is part of the result, is an argument of the call. ``joins_heads``: as in
    ``FlashAttentionConfig``.
    """

    q_tile: int | None = tile_field()
    kv_tile: int | None = tile_field()
    num_warps: int | None = warps_field()
    num_stages: int | None = stages_field()
    joins_heads: bool | None = flag_field()


@dataclass(frozen=True)
class _RecurrenceConfig(OpConfig):
    time_tile: int | None = tile_field()
    dk_tile: int | None = tile_field()
    dv_tile: int | None = tile_field()
    num_warps: int | None = warps_field()
    num_stages: int | None = stages_field()


@dataclass(frozen=True)
class RecurrentAttentionConfig(_RecurrenceConfig):
    """Tiles of recurrent_attention: ``time_tile`` tokens a chunk, ``dv_tile`` columns of values."""


@dataclass(frozen=True)
class GLAttentionConfig(_RecurrenceConfig):
    """Tiles of gla_attention, by the fields of RecurrentAttentionConfig."""


@dataclass(frozen=True)
class LightningAttentionConfig(_RecurrenceConfig):
    """Tiles of lightning_attention, by the fields of RecurrentAttentionConfig."""


@dataclass(frozen=True)
class GatedDeltaRuleConfig(_RecurrenceConfig):
    """Tiles of gated_delta_rule, by the fields of RecurrentAttentionConfig."""


@dataclass(frozen=True)
class _TokenChannelConfig(OpConfig):
    token_tile: int | None = tile_field()
    channel_tile: int | None = tile_field()
    num_warps: int | None = warps_field()


@dataclass(frozen=True)
class MeanPoolingConfig(_TokenChannelConfig):
    """Tiles of mean_pooling."""


@dataclass(frozen=True)
class CausalConv1DConfig(_TokenChannelConfig):
    """Tiles of causal_conv1d."""


@dataclass(frozen=True)
class GroupedMatmulConfig(OpConfig):
    """Tiles of grouped_matmul: ``block_m`` rows, ``block_n`` columns, ``block_k`` inner a step."""

    block_m: int | None = tile_field()
    block_n: int | None = tile_field()
    block_k: int | None = tile_field()
    num_warps: int | None = warps_field()
    num_stages: int | None = stages_field()


RaggedPageAttentionv2Config = RaggedPageAttentionConfig
