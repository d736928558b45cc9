"""Processes that share GPUs and take work until a time limit; those that die are replaced."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

GRACE_SECONDS = 30
"""What work gets that is under way at the limit."""
# a kernel that fails in this way leaves nothing that later work of the process could use
LOST_CONTEXT = ("CUDA_ERROR", "illegal memory access", "unspecified launch failure", "INTERNAL:")


def visible_gpus(count: int) -> list[str]:
    """Returns the names of the first ``count`` GPUs that this process may use."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (names.split(",") if names else [str(n) for n in range(count)])[:count]


def interrupt_at_sigterm() -> None:
    """Makes SIGTERM a KeyboardInterrupt, once: ``timeout`` sends it twice, also to the group."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def run_processes(
    body: Callable[..., None],
    arguments: tuple[Any, ...],
    processes: int,
    seconds: float,
    *,
    receive: Callable[[Any], None],
    continues: Callable[[int, int | None, int], bool],
    is_stuck: Callable[[int], bool] = lambda process: False,
) -> None:
    """Runs processes until all have ended or the limit is over; Ctrl-C ends them, too.

    Args:
        body: of a process: takes its number, ``arguments``, the shared index of the next piece of
            work (a ``multiprocessing.Value``), the time after which it takes no more, and the
            queue of its reports.
        arguments: what every process gets, picklable.
        processes: how many run at a time.
        seconds: the limit; work under way then has ``GRACE_SECONDS`` more.
        receive: takes every report, in the order of a process.
        continues: takes the number of a process that has ended, its exit code and the index of the
            next piece of work; says whether another takes its place.
        is_stuck: says whether a process is to be killed.
    """
    context = multiprocessing.get_context("spawn")
    counter, reports = context.Value("i", 0), context.SimpleQueue()
    deadline, numbers = time.time() + seconds, itertools.count()
    alive: dict[int, Any] = {}

    def start() -> None:
        number = next(numbers)
        values = (number, *arguments, counter, deadline, reports)
        alive[number] = context.Process(target=body, args=values, daemon=True)
        alive[number].start()

    def receive_all() -> None:
        while not reports.empty():
            receive(reports.get())

    for _ in range(processes):
        start()
    with contextlib.suppress(KeyboardInterrupt):  # what is known by then counts
        while alive and time.time() < deadline + GRACE_SECONDS:
            ended = [number for number, process in alive.items() if not process.is_alive()]
            receive_all()  # a process may have reported just before it ended
            for number in ended:
                code = alive.pop(number).exitcode
                if continues(number, code, counter.value) and time.time() < deadline:
                    start()
            for number in filter(is_stuck, alive):
                alive[number].kill()
            time.sleep(0.05)
    receive_all()
    for process in alive.values():
        process.kill()
