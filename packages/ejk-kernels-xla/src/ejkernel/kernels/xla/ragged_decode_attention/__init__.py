"""Decoding from a contiguous key/value cache with a start and an end per row."""
