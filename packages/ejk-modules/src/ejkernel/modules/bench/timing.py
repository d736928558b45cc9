"""Timing that finishes on the device: warm-up, interleaved rounds, median and spread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.execution.timing import QueueClock

SHORT_S = 3e-4
"""Below this a GPU waits for the host: such programs are timed by the kernels' own clock."""

KERNEL_CALLS = 50
RESULT_BYTES = 2**31  # that the results of those calls may take together
PAUSE_S = 0.5
"""Before those calls. A GPU under load changes its clock several times a second: the same call took
0.251 and 0.299 ms on an H200 that had just been busy, 0.219 to 0.220 after a rest."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median of the rounds, and half the central half of them.

    ``clock``: "host" when calls were queued and waited for, "device" for the time of the kernels
    alone, without gaps between them.
    """

    median: float
    spread: float
    clock: str = "host"


class Program:
    """A compiled program with its arguments, of which a call may replace some by its results.

    ``updates``: indices of such arguments, which are donated to the program, and of the
    results.
    """

    def __init__(
        self, compiled: Any, arguments: Sequence[Any], updates: Mapping[int, int] | None = None
    ):
        self.compiled = compiled
        self.updates = dict(updates or {})
        self.arguments = list(arguments)
        for i in self.updates:
            self.arguments[i] = jnp.array(self.arguments[i])  # others need theirs

    def __call__(self) -> Any:
        results = self.compiled(*self.arguments)
        for i, result in self.updates.items():
            self.arguments[i] = results[result]
        return results


def time_together(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 9, target_s: float = 0.2
) -> dict[str, Timing]:
    """Times several zero-argument calls alternately, so that a slow moment hits all of them.

    Each round calls every contender often enough to fill ``target_s`` and waits for the device
    once at the end, which keeps dispatch out of the time of all but the shortest kernels. Those
    (on a GPU, where the contender is a ``Program``) are timed once more by the device itself, each
    after a rest; if one is, all are, so that their times compare.
    """
    run = QueueClock().seconds
    calls: dict[str, int] = {}
    for name, fn in contenders.items():
        jax.block_until_ready(fn())
        calls[name] = max(1, min(1000, round(target_s / max(run(fn, 1), 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    for number in range(rounds):
        for name in _round_order(list(contenders), number):
            samples[name].append(run(contenders[name], calls[name]))
    result = {name: _timing(values) for name, values in samples.items()}
    if min((t.median for t in result.values()), default=1.0) < SHORT_S:
        on_device = {name: device_timing(fn) for name, fn in contenders.items()}
        if all(on_device.values()):
            return {name: t for name, t in on_device.items() if t is not None}
    return result


def _round_order(names: list[str], number: int) -> list[str]:
    """Returns the order of a round: a row of a Williams square.

    The previous contender heats the GPU, which slows the next by up to 6%. In as many rounds as
    there are contenders, or twice as many of an odd number, each follows every other equally often.

    Source: Williams 1949, "Experimental designs balanced for the estimation of residual effects of
    treatments".
    """
    count = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    row = [names[(index + number) % count] for index in zigzag]
    return row[::-1] if count % 2 and number // count % 2 else row


def _timing(seconds: list[float], clock: str = "host") -> Timing:
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return Timing(float(middle), float(high - low) / 2, clock)


def device_timing(fn: Callable[[], Any]) -> Timing | None:
    """Returns the kernels' own time per call, after a pause; None where the device has no clock."""
    if jax.default_backend() != "gpu" or not isinstance(fn, Program) or fn.updates:
        return None  # JAX's profiler waits for every call's results, which updates give away
    try:
        from ejkernel.ops.compat import kernel_times

        size = getattr(fn.compiled.memory_analysis(), "output_size_in_bytes", 0) or 1
        calls = int(max(2, min(KERNEL_CALLS, RESULT_BYTES // size)))
        time.sleep(PAUSE_S)
        milliseconds = kernel_times(fn.compiled, fn.arguments, calls)
    except Exception:  # a machine without CUPTI, or one where another process uses it
        return None
    return _timing([ms * 1e-3 for ms in milliseconds], "device") if milliseconds else None
