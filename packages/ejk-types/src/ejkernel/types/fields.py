"""The name under which pickles of earlier versions call the function that rebuilds a mask."""

from ejkernel.types.masks.fields import unflatten

__all__ = ["unflatten"]
