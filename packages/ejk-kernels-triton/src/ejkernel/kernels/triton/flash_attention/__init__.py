"""Flash attention in Triton: forward, query gradient, key gradients, bias gradient."""
