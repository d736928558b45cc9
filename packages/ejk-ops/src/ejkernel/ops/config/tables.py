"""Tables of tuned configs shipped inside kernel packages: read only, nearest bucket wins.

A table is a file of the persistent cache's schema whose entries carry, as ``facts``, the payload
of the key they were tuned for. An entry fits a call when everything but the sizes of bucketed axes
is equal; among those that fit, the nearest one on a logarithmic scale comes first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops.config.store import Entry, read_table
from ejkernel.ops.errors import warn_once
from ejkernel.ops.utils.buckets import bucket_distance

_ARRAY = {"shape", "dtype", "sharding", "free"}


@functools.lru_cache(maxsize=256)
def _read(path: Path, stamp: int) -> tuple[Entry, ...]:
    try:
        entries = tuple(read_table(path)[1].values())
    except (OSError, ValueError) as error:
        warn_once(("table", str(path)), f"shipped config table {path} is not used: {error}")
        return ()
    return tuple(e for e in entries if isinstance(e.facts, Mapping))


def _entries(path: Path) -> tuple[Entry, ...]:
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        stamp = 0
    return _read(path, stamp)


def payload_distance(a: Any, b: Any) -> float:
    """Distance of two key payloads: 0 for one bucket, infinite unless only free axes differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return math.inf
        if a.keys() == _ARRAY:
            return _array_distance(a, b)
        return _sum(payload_distance(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return math.inf
        return _sum(payload_distance(x, y) for x, y in zip(a, b, strict=True))
    return 0.0 if type(a) is type(b) and a == b else math.inf


def _sum(distances: Iterable[float]) -> float:
    total = 0.0
    for distance in distances:
        total += distance
        if total == math.inf:
            break
    return total


def _array_distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    if any(a[k] != b[k] for k in ("dtype", "sharding", "free")) or len(a["shape"]) != len(
        b["shape"]
    ):
        return math.inf
    free = set(a["free"])
    fixed = [i for i in range(len(a["shape"])) if i not in free]
    if any(a["shape"][i] != b["shape"][i] for i in fixed):
        return math.inf
    return bucket_distance([a["shape"][i] for i in free], [b["shape"][i] for i in free])


def nearest_configs(
    paths: Iterable[Path], payload: Mapping[str, Any], cls: type | None
) -> Iterator[tuple[Any, float]]:
    """``(config, distance)`` of the entries that fit ``payload``, nearest first."""
    found = []
    for path in paths:
        for entry in _entries(path):
            distance = payload_distance(entry.facts, payload)
            if distance < math.inf:
                found.append((distance, len(found), entry))
    for distance, _, entry in sorted(found, key=lambda item: item[:2]):
        cfg = entry.config(cls)
        if cfg is not None:
            yield cfg, distance
