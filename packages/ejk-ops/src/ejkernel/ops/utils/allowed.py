"""The classes that a file may name: classes that code of this process has declared, no others.

Caches, tables, recordings and messages between processes name classes as ``"module:qualified
name"``. Every reader looks the name up here. Nothing of a name is imported, and being importable
is not enough: an undeclared class is refused by its name.

Declared are kernels (defining one is enough), their configs, every ``OpConfig``, every config that
this process has put into a cache, the types of arguments that ``ejkernel`` itself has, and what
``allow_in_files`` was called with.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
T = TypeVar("T")

_classes: dict[str, type] = {}
_offers: dict[str, Callable[[], type]] = {}

# Our own module that declares the operations and their types; loaded when a file names one.
_DECLARES = "ejkernel.modules._declared"
_DECLARED_THERE = ("ejkernel.modules.", "ejkernel.types.")


class UnknownClass(ValueError, LookupError):
    """A file names a class that this process has not declared."""


def class_name(cls: type) -> str:
    """Returns the name of a class in files."""
    return f"{cls.__module__}:{cls.__qualname__}"


def allow_in_files(cls: C) -> C:
    """Let files that this process reads name this class, so that its objects come back.

    For configs that belong to no Kernel, and for enums, dataclasses and pytree nodes among the
    arguments of recorded calls. Kernels and their configs need no such line. A decorator::

        @allow_in_files
        @dataclass(frozen=True)
        class Layout: ...

    Reading constructs such objects from the plain values in the file; the class has to stand any.
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls must be a class, got {cls!r}")
    _classes[class_name(cls)] = cls
    return cls


def offer(name: str, load: Callable[[], type]) -> None:
    """Allows a class that is not loaded yet in files; ``load`` returns it."""
    _offers[name] = load


def allowed_class(name: Any, kind: type[T]) -> type[T]:
    """The declared class of this name.

    Args:
        name: what the file says, of whatever type.
        kind: the class must be this or a subclass.

    Raises:
        UnknownClass: none; names it.
    """
    cls = _look_up(name) if isinstance(name, str) else None
    if cls is None:
        raise UnknownClass(
            f"class {name!r} is not known to this process: files may name kernels and configs "
            "that are defined here, and what ejkernel.ops.allow_in_files was called with"
        )
    if not issubclass(cls, kind):
        raise UnknownClass(f"class {name!r} is no {kind.__name__}")
    return cls


def _look_up(name: str) -> type | None:
    cls = _classes.get(name)
    if cls is None and name not in _offers and name.startswith(_DECLARED_THERE):
        try:
            importlib.import_module(_DECLARES)  # a fixed module
        except ImportError:  # ejk-ops alone
            return None
        cls = _classes.get(name)
    if cls is None and name in _offers:
        cls = allow_in_files(_offers[name]())
    return cls
