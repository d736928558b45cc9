"""Flash attention for TPUs: forward, query gradient, key gradients."""
