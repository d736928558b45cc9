"""Decoding from a paged key/value cache."""
