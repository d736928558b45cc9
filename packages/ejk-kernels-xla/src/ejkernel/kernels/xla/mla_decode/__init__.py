"""Decoding from a paged cache of latent rows."""
