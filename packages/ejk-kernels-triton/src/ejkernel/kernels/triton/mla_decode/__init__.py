"""Latent attention over pages in Triton."""
