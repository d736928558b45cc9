"""Kernels for TPUs, in Pallas for Mosaic TPU."""
