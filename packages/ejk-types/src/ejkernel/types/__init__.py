"""What an attention mask means: MaskInfo and its helpers for JAX."""

from ejkernel.types._version import __version__
from ejkernel.types.combine import combine_masks, intersect
from ejkernel.types.errors import InvalidArgument
from ejkernel.types.mask_info import MaskInfo
from ejkernel.types.prepare import PreparedMask, prepare_mask
from ejkernel.types.rules import Rule

__all__ = [
    "InvalidArgument",
    "MaskInfo",
    "PreparedMask",
    "Rule",
    "__version__",
    "combine_masks",
    "intersect",
    "prepare_mask",
]
