"""Calls (function, *case) of a script, chosen by kind or by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def label(call: Sequence) -> str:
    return " ".join((call[0].__name__, *map(str, call[1:])))


def chosen(calls: Sequence[Sequence], names: Sequence[str]) -> list[Sequence]:
    """Returns the calls of these kinds and names, all if there are none."""
    kinds = dict.fromkeys(call[0].__name__ for call in calls)
    unknown = [x for x in names if x not in kinds and x not in map(label, calls)]
    if unknown:
        sys.exit(f"no such calls: {', '.join(unknown)}; kinds are {', '.join(kinds)}")
    return [c for c in calls if not names or c[0].__name__ in names or label(c) in names]
