"""Kernels, the description of a call, keys, and how gradients are wired."""
