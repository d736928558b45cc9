"""Errors and warnings of the framework.

Every message names the argument, what was given and what is allowed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable


class InvalidArgument(TypeError, ValueError):
    """An argument has the wrong class, dtype, rank, axis size, or disagrees with another one."""


class KernelNotSupported(NotImplementedError):
    """The platform that was asked for cannot do this call.

    Attributes:
        algorithm: name of the operation.
        platform: the platform that was asked for, None when any was acceptable.
        argument: the argument that stands in the way, None when no single one does.
        reason: why, in a few words.
        nearest: the platform that can do the call, None when there is none.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        algorithm: str | None = None,
        platform: str | None = None,
        argument: str | None = None,
        reason: str = "",
        nearest: str | None = None,
    ):
        self.algorithm = algorithm
        self.platform = platform
        self.argument = argument
        self.reason = reason
        self.nearest = nearest
        super().__init__(self._compose() if message is None else message)

    def _compose(self) -> str:
        where = f"on platform {self.platform!r}" if self.platform else "on any platform"
        text = f"{self.algorithm} is not supported {where}: {self.reason}"
        if self.argument and self.argument not in self.reason:
            text += f" (argument {self.argument!r})"
        if self.nearest:
            text += f"; platform {self.nearest!r} can do this call"
        return text


class KernelNotFound(LookupError):
    """Nothing is registered under the algorithm's name, or nothing for the platform."""


class KernelUnavailable(KernelNotSupported, KernelNotFound):
    """Nothing is registered for the forced platform, and it could not run here either.

    Also raised, chained to the cause, when the platform's package is installed but fails to load.
    """


class ConfigError(ValueError):
    """A field of a config has an illegal value, or a config is illegal for the call."""


class NoConfigError(LookupError):
    """No tier of the selector could give a config."""


class AutotuneError(RuntimeError):
    """Every candidate failed, or the processes of a job could not agree on a config."""


class EjkernelWarning(UserWarning):
    """Something went wrong that does not change any result. Issued once per cause."""


_warned: set[Hashable] = set()
_warned_lock = threading.Lock()


def warn_once(cause: Hashable, message: str, *, stacklevel: int = 3) -> None:
    """Issue an ``EjkernelWarning`` unless one was already issued for ``cause``."""
    with _warned_lock:
        if cause in _warned:
            return
        _warned.add(cause)
    warnings.warn(message, EjkernelWarning, stacklevel=stacklevel)


def warn_caution(message: str) -> None:
    """Warn once about a call that is legal but probably not what its caller wants."""
    warn_once(message, message)


def reset_warnings() -> None:
    """Forget which causes were warned about. For tests."""
    with _warned_lock:
        _warned.clear()
