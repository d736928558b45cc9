"""Pieces that the Hopper kernels share."""
