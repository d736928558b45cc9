"""Attention over caches in Triton: decoding, prefill, and their schedule and merge."""
