"""Decoding from a contiguous cache in Triton."""
