"""Paged decoding in Triton."""
