"""Grouped matrix products in Triton."""
