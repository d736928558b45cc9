"""``triton`` and ``tl`` for kernel files, with stand-ins where Triton is not installed.

A kernel's file also holds its launch class, which gives the types of the results while a program
is traced. Programs for GPUs can be traced on machines without Triton, and then nobody runs the
stand-ins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class _Missing:
    """Stands in for a module that is not installed, its attributes and what its functions make."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: Any) -> _Missing:
        return self


if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton, tl = _Missing("triton"), _Missing("triton.language")

__all__ = ["tl", "triton"]
