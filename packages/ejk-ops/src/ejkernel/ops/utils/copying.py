"""Copies, here or in another process, of objects that hold locks and files of this one."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

_LOCKS: dict[type, Callable[[], Any]] = {
    type(make()): make for make in (threading.Lock, threading.RLock)
}


class _NewLock:
    """Stands for a lock in the state of a copy."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make


class Copyable:
    """Base class of objects whose copies, serialised ones too, have locks of their own.

    A subclass names other attributes that a copy must not share, and how they are made:
    ``class Cache(Copyable, process_local={"_files": dict})``. Its containers are copied under
    ``_lock``, so an object may be copied while another thread changes it.
    """

    _process_local: ClassVar[Mapping[str, Callable[[], Any]]] = MappingProxyType({})

    def __init_subclass__(
        cls, process_local: Mapping[str, Callable[[], Any]] | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if process_local is not None:
            cls._process_local = process_local

    def __getstate__(self) -> dict[str, Any]:
        state = {}
        with getattr(self, "_lock", contextlib.nullcontext()):
            for name, value in vars(self).items():
                if name in self._process_local:
                    continue
                if type(value) in _LOCKS:
                    value = _NewLock(_LOCKS[type(value)])
                elif type(value) in (dict, list, set):
                    value = copy.copy(value)
                state[name] = value
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            self.__dict__[name] = value.make() if isinstance(value, _NewLock) else value
        for name, make in self._process_local.items():
            self.__dict__[name] = make()
