"""What an attention mask means: MaskInfo and its helpers for JAX."""

from ejkernel.types._version import __version__

__all__ = ["__version__"]
