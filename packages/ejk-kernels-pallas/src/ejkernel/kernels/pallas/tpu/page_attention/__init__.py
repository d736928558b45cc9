"""Decoding over a paged cache, for TPUs."""
