"""Ragged attention that also writes the cache, in Triton."""
