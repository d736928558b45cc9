"""Block-sparse attention in Triton: flash attention's kernels over lists of tiles."""

from ejkernel.kernels.triton.blocksparse_attention.implementation import blocksparse_attention

__all__ = ["blocksparse_attention"]
