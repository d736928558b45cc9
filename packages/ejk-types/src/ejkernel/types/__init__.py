"""Descriptions of attention masks: MaskInfo and its helpers for JAX."""

from ejkernel.types._version import __version__
from ejkernel.types.errors import InvalidArgument
from ejkernel.types.masks.apply import intersect
from ejkernel.types.masks.combine import combine_masks
from ejkernel.types.masks.convert import (
    cu_seqlens_to_mask,
    mask_to_segment_ids,
    segment_ids_to_mask,
    segment_ids_to_qkv_masks,
)
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.masks.prepare import PreparedMask, prepare_mask
from ejkernel.types.masks.rules import Rule
from ejkernel.types.masks.segments import (
    cu_seqlens_to_lengths,
    cu_seqlens_to_positions,
    cu_seqlens_to_segment_ids,
    lengths_to_cu_seqlens,
    segment_ids_to_cu_seqlens,
)
from ejkernel.types.masks.sharding import MaskSharding
from ejkernel.types.masks.summary import BlockSummary

__all__ = [
    "BlockSummary",
    "InvalidArgument",
    "MaskInfo",
    "MaskSharding",
    "PreparedMask",
    "Rule",
    "__version__",
    "combine_masks",
    "cu_seqlens_to_lengths",
    "cu_seqlens_to_mask",
    "cu_seqlens_to_positions",
    "cu_seqlens_to_segment_ids",
    "intersect",
    "lengths_to_cu_seqlens",
    "mask_to_segment_ids",
    "prepare_mask",
    "segment_ids_to_cu_seqlens",
    "segment_ids_to_mask",
    "segment_ids_to_qkv_masks",
]
