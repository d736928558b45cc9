"""Ragged attention over pages on Hopper."""
