"""Serving on Hopper: prefill and decoding over paged caches."""
