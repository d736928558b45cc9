"""Pieces that the kernels for GPUs and for TPUs share."""
