"""Several calls tuned in a row: the next ones compile while one has the device."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.execution.autotuner import GRACE_S, Autotuner, Inputs
from ejkernel.ops.execution.isolation import Surroundings
from ejkernel.ops.execution.trials import AutotuneResult
from ejkernel.ops.utils.device import target_device

# A thread that compiles in Python gives way to the one that measures this soon, in seconds.
SWITCH_S = 2e-4


@dataclass(frozen=True)
class Job:
    """One call to tune.

    ``inputs`` makes the concrete ``(args, kwargs)`` to run on; None = as ``Autotuner.tune``.
    ``about``: whatever the caller wants to find it by.
    """

    inv: Invocation
    inputs: Callable[[], Inputs] | None = None
    about: Any = None


def tune_in_turn(
    tuner: Autotuner, jobs: Iterable[Job], *, ahead: int = 1, end: float | None = None
) -> Generator[tuple[Job, AutotuneResult | Exception]]:
    """Tune calls, each as ``tuner.tune`` does; compiling overlaps, use of the device does not.

    Args:
        tuner: its ``gate`` is set for the time of the run.
        jobs: the calls; drawn one by one as their turn comes.
        ahead: how many later calls may compile while one is measured; 0 = none.
        end: on ``time.monotonic``; calls not begun by then are left out.

    Yields:
        ``(job, result or error)`` as they finish. Calls under way when Ctrl-C is pressed or the
        generator is closed are given up; those that had finished are yielded before Ctrl-C is
        raised again.
    """
    if ahead < 0:
        raise ValueError(f"ahead={ahead!r}: expected an integer >= 0")
    before = tuner.gate
    tuner.gate = threading.Lock() if ahead and before is None else before
    surroundings = Surroundings.capture(target_device().device)
    pool = futures.ThreadPoolExecutor(ahead + 1, thread_name_prefix="ejkernel-pipeline")
    source = iter(jobs)
    running: dict[futures.Future[Any], Job] = {}

    def fill() -> None:
        while len(running) <= ahead and (end is None or time.monotonic() <= end):
            job = next(source, None)
            if job is None:
                return
            tune = functools.partial(tuner.tune, job.inv, inputs=job.inputs)
            running[pool.submit(surroundings.run, tune)] = job

    try:
        with _gives_way(ahead > 0):
            fill()
            while running:
                done, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                for future in sorted(done, key=list(running).index):
                    yield running.pop(future), _outcome(future)
                fill()
    except KeyboardInterrupt:
        for future in [f for f in running if f.done() and f.exception() is None]:
            yield running.pop(future), future.result()
        raise
    finally:
        _give_up(tuner, running)
        pool.shutdown(wait=False, cancel_futures=True)
        tuner.gate = before


def _outcome(future: futures.Future[AutotuneResult]) -> AutotuneResult | Exception:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, Exception):
        return error
    raise error


def _give_up(tuner: Autotuner, running: Iterable[futures.Future[Any]]) -> None:
    """Let what is under way end; a program on the device is waited for a while."""
    left = list(running)
    end = time.monotonic() + GRACE_S
    while left and time.monotonic() < end:
        tuner.stop()  # also those that begin only now
        left = [future for future in left if not (future.cancel() or future.done())]
        futures.wait(left, timeout=0.1)


@contextlib.contextmanager
def _gives_way(wanted: bool) -> Generator[None]:
    """Shorter turns of Python threads, so that the one that measures is not kept waiting."""
    usual = sys.getswitchinterval()
    if wanted:
        sys.setswitchinterval(min(usual, SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
