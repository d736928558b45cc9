"""Tables of tuned configs shipped inside kernel packages: read only, nearest call wins.

A table is a file of the persistent cache's schema. Its entries carry, as metadata, the payload of
the key they were tuned for; its header has ``"provenance"``: device, date, versions. A call uses
the nearest entry whose ``key_distance`` is finite.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops.config.key_distance import (
    NO_RULES,
    SimilarityRules,
    distance_within_schema,
    key_schema,
    subject,
)
from ejkernel.ops.config.store import Entry, read_table
from ejkernel.ops.errors import warn_once


class Table:
    """The entries of a table that carry the payload they were tuned for."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.subjects: dict[Hashable, list[Entry]] = {}
        self._by_schema: dict[Hashable, dict[Hashable, list[Entry]]] = {}
        for entry in entries:
            if isinstance(entry.metadata, Mapping):
                with contextlib.suppress(TypeError):  # metadata of another form says nothing
                    self.subjects.setdefault(subject(entry.metadata), []).append(entry)

    def entries_with_schema(
        self, about: Hashable, schema: Hashable, rules: SimilarityRules
    ) -> list[Entry]:
        """Returns the entries about a subject whose keys have a schema."""
        by_schema = self._by_schema.get((about, rules))
        if by_schema is None:
            by_schema = {}
            for entry in self.subjects[about]:
                with contextlib.suppress(AttributeError, LookupError, TypeError):
                    by_schema.setdefault(key_schema(entry.metadata, rules), []).append(entry)
            self._by_schema[about, rules] = by_schema
        return by_schema.get(schema, [])


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
    rules: SimilarityRules = NO_RULES,
) -> Iterator[tuple[Any, float]]:
    """``(config, distance)`` of the entries that serve ``payload``, nearest first."""
    about = subject(payload)
    tables = [table for table in map(_table, paths) if about in table.subjects]
    schema = key_schema(payload, rules) if tables else None
    matches = []
    for table in tables:
        for entry in table.entries_with_schema(about, schema, rules):
            distance = _distance(entry, payload, rules)
            if distance < math.inf:
                matches.append((distance, len(matches), entry))
    for distance, _, entry in sorted(matches, key=lambda item: item[:2]):
        cfg = entry.config(cls)
        if cfg is not None:
            yield cfg, distance


def _distance(entry: Entry, payload: Mapping[str, Any], rules: SimilarityRules) -> float:
    try:
        return distance_within_schema(entry.metadata, payload, rules)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return math.inf  # metadata of another form says nothing about any call


def covers(paths: Iterable[Path], payload: Mapping[str, Any]) -> bool:
    """Returns whether some table holds entries of this kernel for this device."""
    about = subject(payload)
    return any(about in _table(path).subjects for path in paths)
