"""Flash attention for Hopper GPUs."""
