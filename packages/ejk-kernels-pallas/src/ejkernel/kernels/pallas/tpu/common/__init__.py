"""Pieces that several TPU kernels use."""
