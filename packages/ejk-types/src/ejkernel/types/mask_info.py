"""The name of MaskInfo in stored files: keys of configs, recorded calls, pickles."""

from ejkernel.types.masks.mask_info import MaskInfo

__all__ = ["MaskInfo"]
