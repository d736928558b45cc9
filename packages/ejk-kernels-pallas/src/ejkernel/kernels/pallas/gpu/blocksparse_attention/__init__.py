"""Block-sparse attention on Hopper: flash attention's kernels over lists of tiles."""
