"""Latent decoding, for TPUs."""
