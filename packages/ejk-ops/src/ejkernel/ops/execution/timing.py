"""Time on the device: clocks that exclude the host, and the comparison of compiled programs.

A program that runs for a while is timed by queueing calls back to back and waiting once: the host
runs ahead, and its share is the latency of one launch in a sample of ``SAMPLE_S``. A GPU
program shorter than ``SHORT_S`` would wait for the host at every launch; its kernels are timed by
CUPTI through JAX's own profiler, which counts no gap between them.
"""

from __future__ import annotations

import math
import numbers
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from ejkernel.ops import compat
from ejkernel.ops.errors import warn_once

# One sample lasts at least this long, so that dispatch and the clock do not dominate short kernels.
SAMPLE_S = 5e-3
MOST_CALLS = 200
# Programs that take longer than this are warm after one call.
WARMUP_S = 0.5
# Below this a launch from the host takes a noticeable part of the time.
SHORT_S = 5e-4
# The limit while other threads of this process compile, which hold the GIL for milliseconds.
SHORT_BUSY_S = 2e-2
CUPTI_CALLS = 20
# A program this much slower than the best is dropped at once, whatever its rank.
DROPPED_BEYOND = 2.0


@dataclass(frozen=True)
class Timed:
    """Milliseconds per call.

    Attributes:
        ms: median of the samples.
        spread: half the distance between their quartiles, relative to the median.
        samples: their number.
    """

    ms: float
    spread: float = 0.0
    samples: int = 1


class Clock(Protocol):
    """Measures one program. ``worth``: the QueueClock samples that one of its samples replaces."""

    worth: int

    def seconds(self, program: Callable[[], Any], calls: int) -> float:
        """Seconds per call of ``calls`` calls in a row."""
        ...


class QueueClock:
    """Queues the calls, waits once. For every device."""

    worth = 1

    def seconds(self, program: Callable[[], Any], calls: int) -> float:
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = program()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls


class KernelClock:
    """The sum of the kernels' own times, by CUPTI; as QueueClock once CUPTI has refused.

    CUPTI serves one client at a time: under a profiler it refuses.

    Args:
        attached: CUPTI stays in the process between samples: taking it out is not safe while
            other threads call the driver.

    Attributes:
        samples: how many CUPTI took.
        refusal: why it took no more, None as long as it does.
    """

    worth = 4  # every call is timed by itself, free of the host

    def __init__(self, *, attached: bool = False) -> None:
        self.attached = attached
        self.fallback: QueueClock | None = None
        self.samples = 0
        self.refusal: str | None = None

    def seconds(self, program: Callable[[], Any], calls: int) -> float:
        if self.fallback is None:
            try:
                seconds = self._twice(program, min(calls, CUPTI_CALLS))
                self.samples += 1
                return seconds
            except Exception as error:
                self.fallback = QueueClock()
                self.refusal = f"{type(error).__name__}: {error}"
                warn_once(
                    ("cupti",),
                    "kernels shorter than half a millisecond are timed from the host, which blurs "
                    f"their differences: CUPTI does not answer ({self.refusal})",
                )
        return self.fallback.seconds(program, calls)

    def _twice(self, program: Any, calls: int) -> float:
        """Tries again where kernels of other threads may have been counted."""
        if not self.attached:
            return self._kernels(program, calls)
        try:
            return self._kernels(program, calls)
        except RuntimeError:
            return self._kernels(program, calls)

    def _kernels(self, program: Any, calls: int) -> float:
        detach = {"detach": False} if self.attached else {}
        times = compat.kernel_times(program.compiled, program.arguments, calls, **detach)
        if not times:
            raise RuntimeError("no kernel was seen")
        return statistics.median(times) * 1e-3


kernel_clock = KernelClock()
"""The one of this process: what CUPTI refused once it is not asked again."""

busy_kernel_clock = KernelClock(attached=True)
"""The one for races beside which other threads compile."""


def clock_for(seconds: float, device: Any, *, busy_host: bool = False) -> Clock:
    """The clock for programs of which the fastest takes about ``seconds`` seen from the host."""
    short = SHORT_BUSY_S if busy_host else SHORT_S
    if seconds < short and getattr(device, "platform", None) in ("gpu", "cuda"):
        return busy_kernel_clock if busy_host else kernel_clock
    return QueueClock()


def benchmark(fn: Callable[[], Any], num_iters: int = 100, *, num_warmup: int = 3) -> float:
    """Median time of ``fn()`` in milliseconds, every call waited for.

    Args:
        fn: function without arguments; may return any pytree.
        num_iters: number of timed calls, at least 1.
        num_warmup: number of calls before them, at least 0.

    Raises:
        ValueError: counts out of range.
    """
    check_counts(num_warmup, num_iters)
    for _ in range(num_warmup):
        jax.block_until_ready(fn())
    times = []
    for _ in range(num_iters):
        start = time.perf_counter()
        jax.block_until_ready(fn())
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def check_counts(num_warmup: int, num_iters: int) -> None:
    """ValueError unless there is something to time."""
    for name, count, least in (("num_iters", num_iters, 1), ("num_warmup", num_warmup, 0)):
        if not isinstance(count, numbers.Integral) or count < least:
            raise ValueError(f"{name}={count!r}: expected an integer >= {least}")


@dataclass
class _TimedProgram:
    """A program and its samples."""

    program: Callable[[], Any]
    calls: int = 1
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def timed(self) -> Timed:
        middle = self.median
        if len(self.samples) < 3 or middle <= 0:
            return Timed(middle * 1e3, 0.0, len(self.samples))
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return Timed(middle * 1e3, (high - low) / 2 / middle, len(self.samples))


def compare_programs(
    programs: Sequence[Callable[[], Any]],
    *,
    num_warmup: int,
    num_iters: int,
    deadline: float | None = None,
    device: Any = None,
    stop: Callable[[], bool] = lambda: False,
    busy_host: bool = False,
) -> list[Timed | None]:
    """Time of each program by successive halving: the slower half is dropped after each round.

    Samples of a round are interleaved, so that drift of clocks or of other load affects all alike.
    Three rounds take a quarter, a half and all of ``num_iters`` samples; at least two programs are
    sampled ``num_iters`` times. A program that is far slower is called only once.

    Args:
        programs: compiled programs; the first one is always measured.
        num_warmup: calls before the first sample, fewer of programs that take long.
        num_iters: samples of a program that reaches the last round.
        deadline: on ``time.monotonic``; programs not reached before it give None.
        device: a jax.Device, decides how short programs are timed.
        stop: asked before every sample, True ends the timing like the deadline.
        busy_host: whether other threads of this process work meanwhile.
    """

    def over() -> bool:
        return stop() or (deadline is not None and time.monotonic() > deadline)

    entries = [_TimedProgram(program) for program in programs]
    first: list[tuple[float, _TimedProgram]] = []
    for index, entry in enumerate(entries):
        if index and over():
            break
        first.append((_first_call(entry, num_warmup, 3 if busy_host else 1), entry))
    if not first:
        return []
    fastest = min(once for once, _ in first)
    clock = clock_for(fastest, device, busy_host=busy_host)
    running = []
    for once, entry in first:
        if once > 2 * DROPPED_BEYOND * fastest and once > SAMPLE_S:
            entry.samples.append(once)
        else:
            running.append(entry)
    taken, most = 0, math.ceil(num_iters / clock.worth)
    for part in (4, 2, 1):
        for _ in range(math.ceil(most / part) - taken):
            for entry in running:
                if (entry is not entries[0] or entry.samples) and over():
                    break
                entry.samples.append(clock.seconds(entry.program, entry.calls))
        taken = math.ceil(most / part)
        running = _survivors(running)
    return [entry.timed() if entry.samples else None for entry in entries]


def _first_call(entry: _TimedProgram, num_warmup: int, tries: int) -> float:
    """Returns the seconds of one call as the host sees it, the minimum of ``tries``.

    Sets the number of calls of a sample.
    """
    queue = QueueClock()
    once = queue.seconds(entry.program, 1)
    warm = min(num_warmup, math.ceil(WARMUP_S / max(once, 1e-7)))
    if warm and once < WARMUP_S:
        for _ in range(warm):
            jax.block_until_ready(entry.program())
        once = min(queue.seconds(entry.program, 1) for _ in range(tries))
    entry.calls = max(1, min(MOST_CALLS, math.ceil(SAMPLE_S / max(once, 1e-7))))
    return once


def _survivors(running: list[_TimedProgram]) -> list[_TimedProgram]:
    """Returns the faster half, at least two, without programs far slower than the best."""
    order = sorted((x for x in running if x.samples), key=lambda entry: entry.median)
    faster = order[: max(2, math.ceil(len(order) / 2))]
    return [entry for entry in faster if entry.median <= DROPPED_BEYOND * faster[0].median]
