"""Ragged attention over pages in Triton."""
