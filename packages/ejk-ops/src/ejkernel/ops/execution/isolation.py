"""Work done on the side of a trace: in a thread of its own, whose trace state is fresh."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from ejkernel.ops.compat import settings
from ejkernel.ops.config.choice import config_from_file

T = TypeVar("T")


@dataclass(frozen=True)
class Surroundings:
    """The settings of a thread that change what JAX compiles, to be taken to another thread."""

    context: contextvars.Context
    enable_x64: bool
    matmul_precision: Any
    dtype_promotion: Any
    device: Any

    @classmethod
    def capture(cls, device: Any = None) -> Surroundings:
        """Returns the settings of this thread; arrays are made on ``device``, None = as here."""
        return cls(
            contextvars.copy_context(),
            bool(settings.jax_enable_x64),
            settings.jax_default_matmul_precision,
            settings.jax_numpy_dtype_promotion,
            settings.jax_default_device if device is None else device,
        )

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """``fn(*args)`` in these surroundings; callable from several threads at once."""

        def inside() -> T:
            with contextlib.ExitStack() as stack:
                stack.enter_context(jax.enable_x64(self.enable_x64))
                stack.enter_context(jax.default_matmul_precision(self.matmul_precision))
                stack.enter_context(jax.numpy_dtype_promotion(self.dtype_promotion))
                stack.enter_context(jax.default_device(self.device))
                stack.enter_context(config_from_file(False))  # the call under way is another one
                return fn(*args)

        # a Context object can be entered once at a time
        return self.context.copy().run(inside)


def outside_trace(
    fn: Callable[[], T],
    surroundings: Surroundings,
    on_interrupt: Callable[[], None] | None = None,
    grace_s: float = 0.0,
) -> T:
    """``fn()`` in a new thread, so that no surrounding trace sees its operations.

    Ctrl-C calls ``on_interrupt``, waits ``grace_s`` for the thread to end, and is raised again. If
    the thread is still running then, the process ends after it.
    """
    outcome: dict[str, Any] = {}
    done = threading.Event()  # an interrupted Thread.join takes the thread for ended

    def work() -> None:
        try:
            outcome["value"] = surroundings.run(fn)
        except BaseException as error:
            outcome["error"] = error
        finally:
            done.set()

    thread = threading.Thread(target=work, name="ejkernel-tune", daemon=True)
    thread.start()
    try:
        done.wait()
    except KeyboardInterrupt:
        if on_interrupt is not None:
            on_interrupt()
            done.wait(grace_s)
        if not done.is_set():
            atexit.register(_wait_at_exit, thread)
        raise
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _wait_at_exit(thread: threading.Thread) -> None:
    """Waits for the program that ``thread`` runs; another Ctrl-C ends the process at once.

    Python ends a thread that comes back from C++ after the interpreter has ended by unwinding its
    stack, which C++ answers with abort.
    """
    if not thread.is_alive():
        return
    note = "ejkernel: waiting for the interrupted program to end; Ctrl-C again ends it at once"
    print(note, file=sys.stderr, flush=True)
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    thread.join()
