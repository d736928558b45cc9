"""Timing that waits for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

# One sample lasts at least this long, so that dispatch and the clock do not dominate short kernels.
SAMPLE_S = 2e-3
MOST_REPEATS = 200


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


def _sample(fn: Callable[[], Any], repeats: int) -> float:
    """Seconds per call of ``repeats`` calls in a row, waited for once."""
    start = time.perf_counter()
    result = None
    for _ in range(repeats):
        result = fn()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


def time_side_by_side(
    fns: Sequence[Callable[[], Any]],
    *,
    num_warmup: int,
    num_iters: int,
    deadline: float | None = None,
) -> list[float | None]:
    """Median milliseconds of each function, measured in turns.

    Functions take turns, so that drift of clocks or of other load meets all alike; one that is
    twice as slow as the best after two rounds is not called again. Calls of short functions are
    queued and waited for together. A function not reached before ``deadline`` (of
    ``time.monotonic``) gives None, the first one is always measured.
    """
    repeats: list[int] = []
    samples: list[list[float]] = []
    for index, fn in enumerate(fns):
        if index and deadline is not None and time.monotonic() > deadline:
            break
        for _ in range(num_warmup):
            jax.block_until_ready(fn())
        once = _sample(fn, 1)
        repeats.append(max(1, min(MOST_REPEATS, int(SAMPLE_S / max(once, 1e-7)))))
        samples.append([])
    for turn in range(num_iters):
        best = min((statistics.median(s) for s in samples if s), default=0.0)
        for index, taken in enumerate(samples):
            if taken and deadline is not None and time.monotonic() > deadline:
                continue
            if turn >= 2 and statistics.median(taken) > 2 * best:
                continue
            taken.append(_sample(fns[index], repeats[index]))
    medians: list[float | None] = [statistics.median(s) * 1e3 for s in samples]
    return medians + [None] * (len(fns) - len(medians))
