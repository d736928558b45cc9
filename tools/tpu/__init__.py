"""Checks of the TPU kernels that need no TPU: the compiler in the libtpu wheel."""
