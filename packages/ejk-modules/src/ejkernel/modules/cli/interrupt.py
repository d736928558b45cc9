"""Reliable handling of Ctrl-C.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a callback of the garbage
collector, of which JAX has one, or of a weak reference, and in a finalizer it is printed and
dropped; inside the start of an extension module it comes out as an ImportError.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Self

AGAIN_S = 0.05


class Interrupts:
    """While entered, Ctrl-C is never dropped; ``seen``: whether there was one.

    Does nothing outside the main thread, or where something else handles the signal already.
    """

    def __init__(self) -> None:
        self.seen = False
        self._installed = False

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.seen = True
        if _is_dropped(frame):
            timer = threading.Timer(AGAIN_S, self._again)
            timer.daemon = True
            timer.start()
            return
        raise KeyboardInterrupt

    def _again(self) -> None:
        if self._installed:
            os.kill(os.getpid(), signal.SIGINT)


def _is_dropped(frame: FrameType | None) -> bool:
    """Returns whether Python drops what is raised here: in a callback of the collector or of a weak
    reference, or in a finalizer."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in callbacks or code.co_name == "__del__" or code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def leave(status: int) -> int:
    """End the process at once after Ctrl-C, and while candidates still compile that tuning has
    given up: threads of XLA would crash under an ordinary exit, or be waited for."""
    compiling = any(t.name.startswith("ejkernel-compile") for t in threading.enumerate())
    if status == 130 or compiling:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
