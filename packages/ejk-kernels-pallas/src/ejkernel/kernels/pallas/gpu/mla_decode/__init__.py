"""Latent decoding for Hopper GPUs."""
