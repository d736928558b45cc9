"""Time on the device: clocks that keep the host out of it, and the race of compiled programs.

A program that runs for a while is timed by queueing calls back to back and waiting once: the host
runs ahead, and what is left of it is the latency of one launch in a sample of ``SAMPLE_S``. A GPU
program shorter than ``SHORT_S`` would wait for the host at every launch; its kernels are timed by
CUPTI through JAX's own profiler, which counts no gap between them.
"""

from __future__ import annotations

import math
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
# The same while other threads of this process compile: they hold the interpreter for milliseconds.
SHORT_BUSY_S = 2e-2
CUPTI_CALLS = 20
# A racer this much slower than the best leaves at once, whatever its place.
HOPELESS = 2.0


@dataclass(frozen=True)
class Timed:
    """Milliseconds per call.

    Attributes:
        ms: median of the samples.
        spread: half the distance between their quartiles, relative to the median.
        samples: how many.
    """

    ms: float
    spread: float = 0.0
    samples: int = 1


class Clock(Protocol):
    """Measures one program. ``worth``: how many samples of a QueueClock one of its own equals."""

    worth: int

    def seconds(self, racer: Callable[[], Any], calls: int) -> float:
        """Seconds per call of ``calls`` calls in a row."""
        ...


class QueueClock:
    """Queues the calls, waits once. For every device."""

    worth = 1

    def seconds(self, racer: Callable[[], Any], calls: int) -> float:
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = racer()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls


class KernelClock:
    """The sum of the kernels' own times, by CUPTI; as QueueClock once CUPTI has refused.

    CUPTI serves one customer at a time: under a profiler it refuses.

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

    def seconds(self, racer: Callable[[], Any], calls: int) -> float:
        if self.fallback is None:
            try:
                seconds = self._twice(racer, min(calls, CUPTI_CALLS))
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
        return self.fallback.seconds(racer, calls)

    def _twice(self, racer: Any, calls: int) -> float:
        """A second try where other threads may have been seen, too."""
        if not self.attached:
            return self._kernels(racer, calls)
        try:
            return self._kernels(racer, calls)
        except RuntimeError:
            return self._kernels(racer, calls)

    def _kernels(self, racer: Any, calls: int) -> float:
        detach = {"detach": False} if self.attached else {}
        times = compat.kernel_times(racer.compiled, racer.arguments, calls, **detach)
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
    if num_iters < 1:
        raise ValueError(f"num_iters={num_iters!r}: expected an integer >= 1")
    if num_warmup < 0:
        raise ValueError(f"num_warmup={num_warmup!r}: expected an integer >= 0")


@dataclass
class _Lane:
    """One program of a race."""

    racer: Callable[[], Any]
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


def race(
    racers: Sequence[Callable[[], Any]],
    *,
    num_warmup: int,
    num_iters: int,
    deadline: float | None = None,
    device: Any = None,
    stop: Callable[[], bool] = lambda: False,
    busy_host: bool = False,
) -> list[Timed | None]:
    """Time of each program by successive halving: the slower half leaves after each heat.

    All take turns within a heat, so that drift of clocks or of other load meets all alike. Three
    heats take a quarter, a half and all of ``num_iters`` samples; two finalists at least are
    sampled ``num_iters`` times. A program far behind is called once and no more.

    Args:
        racers: compiled programs; the first one is always measured.
        num_warmup: calls before the first sample, fewer of programs that take long.
        num_iters: samples of a finalist.
        deadline: on ``time.monotonic``; programs not reached before it give None.
        device: a jax.Device, decides how short programs are timed.
        stop: asked before every sample, True ends the race like the deadline.
        busy_host: whether other threads of this process work meanwhile.
    """

    def over() -> bool:
        return stop() or (deadline is not None and time.monotonic() > deadline)

    lanes = [_Lane(racer) for racer in racers]
    first: list[tuple[float, _Lane]] = []
    for index, lane in enumerate(lanes):
        if index and over():
            break
        first.append((_first_call(lane, num_warmup, 3 if busy_host else 1), lane))
    if not first:
        return []
    fastest = min(once for once, _ in first)
    clock = clock_for(fastest, device, busy_host=busy_host)
    running = []
    for once, lane in first:
        if once > 2 * HOPELESS * fastest and once > SAMPLE_S:
            lane.samples.append(once)
        else:
            running.append(lane)
    taken, most = 0, math.ceil(num_iters / clock.worth)
    for part in (4, 2, 1):
        for _ in range(math.ceil(most / part) - taken):
            for lane in running:
                if (lane is not lanes[0] or lane.samples) and over():
                    break
                lane.samples.append(clock.seconds(lane.racer, lane.calls))
        taken = math.ceil(most / part)
        running = _survivors(running)
    return [lane.timed() if lane.samples else None for lane in lanes]


def _first_call(lane: _Lane, num_warmup: int, tries: int) -> float:
    """Seconds of one call as the host sees it, the least of so many; decides how many make a
    sample.
    """
    queue = QueueClock()
    once = queue.seconds(lane.racer, 1)
    warm = min(num_warmup, math.ceil(WARMUP_S / max(once, 1e-7)))
    if warm and once < WARMUP_S:
        for _ in range(warm):
            jax.block_until_ready(lane.racer())
        once = min(queue.seconds(lane.racer, 1) for _ in range(tries))
    lane.calls = max(1, min(MOST_CALLS, math.ceil(SAMPLE_S / max(once, 1e-7))))
    return once


def _survivors(running: list[_Lane]) -> list[_Lane]:
    """The faster half, at least two, none far behind the best."""
    order = sorted((x for x in running if x.samples), key=lambda lane: lane.median)
    kept = order[: max(2, math.ceil(len(order) / 2))]
    return [lane for lane in kept if lane.median <= HOPELESS * kept[0].median]
