"""Block-sparse attention in XLA: every head walks the list of its own tiles."""

from ejkernel.kernels.xla.blocksparse_attention.implementation import blocksparse_attention

__all__ = ["blocksparse_attention"]
