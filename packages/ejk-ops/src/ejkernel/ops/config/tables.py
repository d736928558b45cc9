"""Tables of tuned configs shipped inside kernel packages: read only, nearest call wins.

A table is a file of the persistent cache's schema whose entries carry, as ``facts``, the payload
of the key they were tuned for, and whose header has ``"provenance"``: device, date, versions. The
nearest entry serves a call, if ``config.nearness`` says that it says anything about the call.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops.config.nearness import NOTHING_SAID, Likeness, distance_of_alike, outline, subject
from ejkernel.ops.config.store import Entry, read_table
from ejkernel.ops.errors import warn_once


class Table:
    """The entries of a table that say what they were tuned for."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.subjects: dict[Hashable, list[Entry]] = {}
        self._outlines: dict[Hashable, dict[Hashable, list[Entry]]] = {}
        for entry in entries:
            if isinstance(entry.metadata, Mapping):
                with contextlib.suppress(TypeError):  # metadata of another form says nothing
                    self.subjects.setdefault(subject(entry.metadata), []).append(entry)

    def alike(self, about: Hashable, wanted: Hashable, like: Likeness) -> list[Entry]:
        """The entries about a subject that have an outline."""
        known = self._outlines.get((about, like))
        if known is None:
            known = {}
            for entry in self.subjects[about]:
                with contextlib.suppress(AttributeError, LookupError, TypeError):
                    known.setdefault(outline(entry.metadata, like), []).append(entry)
            self._outlines[about, like] = known
        return known.get(wanted, [])


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
    paths: Iterable[Path],
    payload: Mapping[str, Any],
    cls: type | None,
    like: Likeness = NOTHING_SAID,
) -> Iterator[tuple[Any, float]]:
    """``(config, distance)`` of the entries that serve ``payload``, nearest first."""
    about = subject(payload)
    tables = [table for table in map(_table, paths) if about in table.subjects]
    wanted = outline(payload, like) if tables else None
    found = []
    for table in tables:
        for entry in table.alike(about, wanted, like):
            distance = _distance(entry, payload, like)
            if distance < math.inf:
                found.append((distance, len(found), entry))
    for distance, _, entry in sorted(found, key=lambda item: item[:2]):
        cfg = entry.config(cls)
        if cfg is not None:
            yield cfg, distance


def _distance(entry: Entry, payload: Mapping[str, Any], like: Likeness) -> float:
    try:
        return distance_of_alike(entry.metadata, payload, like)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return math.inf  # metadata of another form says nothing about any call


def covers(paths: Iterable[Path], payload: Mapping[str, Any]) -> bool:
    """Returns whether some table holds entries of this kernel for this device: a known card."""
    wanted = subject(payload)
    return any(wanted in _table(path).subjects for path in paths)
