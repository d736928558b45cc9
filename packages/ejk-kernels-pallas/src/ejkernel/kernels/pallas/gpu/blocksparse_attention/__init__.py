"""Block-sparse attention on Hopper: flash attention's kernels over lists of tiles."""

from ejkernel.kernels.pallas.gpu.blocksparse_attention.implementation import blocksparse_attention

__all__ = ["blocksparse_attention"]
