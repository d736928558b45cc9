"""Kernel, configuration and implementation-registry framework for JAX kernels."""

from ejkernel.ops._version import __version__

__all__ = ["__version__"]
