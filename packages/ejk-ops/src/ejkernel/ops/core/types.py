"""Type variables shared by the whole framework."""

from __future__ import annotations

from typing import TypeVar

Cfg = TypeVar("Cfg")
"""Configuration type of a kernel, e.g. a frozen dataclass of tile sizes."""

Out = TypeVar("Out")
"""Output type of a kernel, e.g. ``jax.Array`` or a tuple of arrays."""
