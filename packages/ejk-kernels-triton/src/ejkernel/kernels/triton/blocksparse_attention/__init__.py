"""Block-sparse attention in Triton: flash attention's kernels over lists of tiles."""
