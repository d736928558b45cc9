"""Tables of tuned configs shipped inside kernel packages: read only, nearest call wins.

A table is a file of the persistent cache's schema whose entries carry, as ``facts``, the payload
of the key they were tuned for, and whose header has ``"provenance"``: device, date, versions. The
nearest entry serves a call, if ``config.nearness`` says that it says anything about the call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops.config.nearness import distance_of_alike, outline, subject
from ejkernel.ops.config.store import Entry, read_table
from ejkernel.ops.errors import warn_once


class Table:
    """The entries of a table that say what they were tuned for, by the outline of that."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.subjects: set[Hashable] = set()
        self.entries: dict[Hashable, list[Entry]] = {}
        for entry in entries:
            if not isinstance(entry.facts, Mapping):
                continue
            try:
                self.entries.setdefault(outline(entry.facts), []).append(entry)
                self.subjects.add(subject(entry.facts))
            except (AttributeError, LookupError, TypeError):
                continue  # facts of another form say nothing about any call


@functools.lru_cache(maxsize=256)
def _read(path: Path, stamp: int) -> Table:
    try:
        _, entries = read_table(path)
    except (OSError, ValueError) as error:
        warn_once(("table", str(path)), f"shipped config table {path} is not used: {error}")
        return Table(())
    return Table(entries.values())


def _table(path: Path) -> Table:
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        stamp = 0
    return _read(path, stamp)


def nearest_configs(
    paths: Iterable[Path], payload: Mapping[str, Any], cls: type | None
) -> Iterator[tuple[Any, float]]:
    """``(config, distance)`` of the entries that serve ``payload``, nearest first."""
    about = subject(payload)
    tables = [table for table in map(_table, paths) if about in table.subjects]
    wanted = outline(payload) if tables else None
    found = []
    for table in tables:
        for entry in table.entries.get(wanted, ()):
            distance = _distance(entry, payload)
            if distance < math.inf:
                found.append((distance, len(found), entry))
    for distance, _, entry in sorted(found, key=lambda item: item[:2]):
        cfg = entry.config(cls)
        if cfg is not None:
            yield cfg, distance


def _distance(entry: Entry, payload: Mapping[str, Any]) -> float:
    try:
        return distance_of_alike(entry.facts, payload)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return math.inf  # facts of another form say nothing about any call


def covers(paths: Iterable[Path], payload: Mapping[str, Any]) -> bool:
    """Whether some table holds entries of this kernel for this device: a known card."""
    wanted = subject(payload)
    return any(wanted in _table(path).subjects for path in paths)
