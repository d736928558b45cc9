"""Timing that finishes on the device: warm-up, rounds side by side, median and spread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median of the rounds, and half the central half of them."""

    median: float
    spread: float
    rounds: int
    calls: int


def _run(fn: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    out = None
    for _ in range(calls):
        out = fn()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def time_together(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 9, target_s: float = 0.2
) -> dict[str, Timing]:
    """Time several zero-argument calls in turns, so that a slow moment hits all of them.

    Each round calls every contender often enough to fill ``target_s`` and waits for the device
    once at the end, which keeps dispatch out of the time of all but the shortest kernels.
    """
    calls: dict[str, int] = {}
    for name, fn in contenders.items():
        jax.block_until_ready(fn())
        calls[name] = max(1, min(1000, round(target_s / max(_run(fn, 1), 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    for _ in range(rounds):
        for name, fn in contenders.items():
            samples[name].append(_run(fn, calls[name]))
    result = {}
    for name, seconds in samples.items():
        low, middle, high = np.percentile(seconds, [25, 50, 75])
        result[name] = Timing(float(middle), float(high - low) / 2, rounds, calls[name])
    return result
