"""Grouped matrix products for Hopper GPUs."""
