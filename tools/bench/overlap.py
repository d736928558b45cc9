"""The share of communication that computation hides, from a profile of the devices' streams."""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

Span = tuple[float, float]
COMMUNICATION = re.compile("nccl|collective|all-reduce|all-gather|all-to-all|permute", re.I)


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the same time in spans that do not touch, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def shared_time(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Returns the time that two sets of spans have in common, each a ``union``."""
    shared, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        shared += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def hidden_share(events: Iterable[tuple[str, float, float]]) -> float | None:
    """Returns the part of communication during which a kernel computes; None without any.

    ``events``: name, start and end of the kernels of one device.
    """
    sent: list[Span] = []
    computed: list[Span] = []
    for name, start, end in events:
        (sent if COMMUNICATION.search(name) else computed).append((start, end))
    total = sum(end - start for start, end in union(sent))
    return shared_time(union(sent), union(computed)) / total if total else None


def profiled_share(call: Callable[[], Any], calls: int = 3) -> float | None:
    """Returns the smallest ``hidden_share`` of the GPUs; None without a profile."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return None
        profile = jax.profiler.ProfileData.from_file(str(files[0]))
        shares = [_share_of_device(p) for p in profile.planes if "/device:GPU" in p.name]
    return min((share for share in shares if share is not None), default=None)


def _share_of_device(plane: Any) -> float | None:
    streams = [line for line in plane.lines if "Stream" in line.name]
    return hidden_share(
        (event.name, event.start_ns, event.start_ns + event.duration_ns)
        for line in streams
        for event in line.events
    )
