"""Latent attention in Triton: flash attention on what latent rows expand to."""
