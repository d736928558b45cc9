"""One call per attention operation in JAX: the user's side of ejkernel."""

from ejkernel.modules._version import __version__

__all__ = ["__version__"]
