"""Tables of tuned configs shipped inside kernel packages: read only, nearest call wins.

A table is a file of the persistent cache's schema whose entries carry, as ``facts``, the payload
of the key they were tuned for, and whose header has ``"provenance"``: device, date, versions. An
entry whose payload differs in the sizes of bucketed axes alone is as far away as the logarithms of
their ratios say. Tiles hardly depend on some other facts (the number of heads, whether there is a
window or a cap), so entries that differ in them serve too, after all that do not; what decides
tiles (dtypes, the last axis, which arrays are given) must be equal.
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

# Octaves that a difference counts for: more than sizes of one model differ by from call to call.
UNEQUAL = 8.0
# An exact axis that is not the last one (heads, groups) counts by its logarithm, this many times.
HEADS_FACTOR = 8.0
# Entries further away than this are no better than arithmetic.
FARTHEST = 40.0


class Table(tuple[Entry, ...]):
    """The entries of a table that say what they were tuned for."""

    header: Mapping[str, Any] = {}


@functools.lru_cache(maxsize=256)
def _read(path: Path, stamp: int) -> Table:
    try:
        header, entries = read_table(path)
    except (OSError, ValueError) as error:
        warn_once(("table", str(path)), f"shipped config table {path} is not used: {error}")
        return Table()
    table = Table(e for e in entries.values() if isinstance(e.facts, Mapping))
    table.header = header
    return table


def _entries(path: Path) -> Table:
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        stamp = 0
    return _read(path, stamp)


def payload_distance(a: Any, b: Any) -> float:
    """Distance of the payload ``a`` of an entry from the payload ``b`` of a call, in octaves.

    0 for one bucket, infinite when the entry says nothing about the call.
    """
    if any(a.get(k) != b.get(k) for k in ("schema", "kernel", "version", "device")):
        return math.inf
    asked, tuned = b.get("platform", "auto"), a.get("platform", "auto")
    if tuned not in ("auto", asked):  # the best of one platform is not the best of all
        return math.inf
    distance = 0.0 if tuned == asked else UNEQUAL / 2
    if any(a.get(k) != b.get(k) for k in ("mesh", "specs")):
        distance += UNEQUAL
    ours, theirs = a.get("arguments", {}), b.get("arguments", {})
    if ours.keys() != theirs.keys():
        return math.inf
    return distance + _sum(_distance(ours[k], theirs[k]) for k in ours)


def _distance(a: Any, b: Any) -> float:
    if a == b and type(a) is type(b):
        return 0.0
    if _is_array(a) or _is_array(b):
        return _array_distance(a, b) if _is_array(a) and _is_array(b) else math.inf
    if _is_node(a) or _is_node(b):
        return _node_distance(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return min(_sum(map(_distance, a, b)), UNEQUAL) if len(a) == len(b) else UNEQUAL
    plain = (bool, int, list, type(None))
    if (isinstance(a, plain) or _is_number(a)) and (isinstance(b, plain) or _is_number(b)):
        return UNEQUAL
    return math.inf


def _is_array(x: Any) -> bool:
    return isinstance(x, Mapping) and x.keys() == _ARRAY


def _is_node(x: Any) -> bool:
    return isinstance(x, Mapping) and "node" in x


def _is_number(x: Any) -> bool:
    return isinstance(x, Mapping) and x.keys() == {"number"}


def _node_distance(a: Any, b: Any) -> float:
    """Of pytrees such as masks: another rule counts, other arrays in it count double."""
    if not (_is_node(a) and _is_node(b)):
        return 2 * UNEQUAL
    if a["node"] != b["node"] or len(a["children"]) != len(b["children"]):
        return math.inf
    static = 0.0 if a["static"] == b["static"] else UNEQUAL
    inner = _sum(map(_distance, a["children"], b["children"]))
    return static + min(inner, 2 * UNEQUAL)


def _sum(distances: Iterable[float]) -> float:
    total = 0.0
    for distance in distances:
        total += distance
        if total == math.inf:
            break
    return total


def _array_distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    ours, theirs = a["shape"], b["shape"]
    if a["dtype"] != b["dtype"] or a["free"] != b["free"] or len(ours) != len(theirs):
        return math.inf
    free = set(a["free"])
    last = len(ours) - 1
    if ours and last not in free and ours[last] != theirs[last]:
        return math.inf
    fixed = [i for i in range(last) if i not in free]
    sizes = bucket_distance([ours[i] for i in free], [theirs[i] for i in free])
    heads = bucket_distance([ours[i] for i in fixed], [theirs[i] for i in fixed])
    placed = 0.0 if a["sharding"] == b["sharding"] else 1.0
    return sizes + HEADS_FACTOR * heads + placed


def nearest_configs(
    paths: Iterable[Path], payload: Mapping[str, Any], cls: type | None
) -> Iterator[tuple[Any, float]]:
    """``(config, distance)`` of the entries that serve ``payload``, nearest first."""
    found = []
    for path in paths:
        for entry in _entries(path):
            distance = payload_distance(entry.facts, payload)
            if distance <= FARTHEST:
                found.append((distance, len(found), entry))
    for distance, _, entry in sorted(found, key=lambda item: item[:2]):
        cfg = entry.config(cls)
        if cfg is not None:
            yield cfg, distance


def covers(paths: Iterable[Path], payload: Mapping[str, Any]) -> bool:
    """Whether some table holds entries of this kernel for this device: a known card."""
    wanted = [payload.get(k) for k in ("schema", "kernel", "version", "device")]
    return any(
        [e.facts.get(k) for k in ("schema", "kernel", "version", "device")] == wanted
        for path in paths
        for e in _entries(path)
    )
