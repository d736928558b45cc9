"""Decoding over a contiguous cache, for TPUs."""
