"""Reports on what a registry holds: a table, and a comparison of signatures."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from ejkernel.ops.implementation import (
    Implementation,
    LazyLoadError,
    hard_differences,
    signature_of,
    soft_differences,
)

_HEAD = ("algorithm", "platform", "backend", "priority", "gradients", "version")


def table(implementations: Sequence[Implementation]) -> str:
    """One line per implementation under a heading."""
    rows = [_HEAD]
    for i in implementations:
        gradients = "yes" if i.differentiable else "no"
        priority = i.priority if i.priority_for is None else f"{i.priority}, by call"
        facts = (i.platform, i.backend, priority, gradients, i.version)
        rows.append((i.algorithm, *map(str, facts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def signature_differences(implementations: Sequence[Implementation]) -> list[str]:
    """How the others differ from the first, one line per difference. Loads all of them."""
    lines: list[str] = []
    first: tuple[Implementation, inspect.Signature] | None = None
    for i in implementations:
        try:
            signature = signature_of(i.load(), i.name)
        except (LazyLoadError, ValueError) as error:
            lines.append(f"{i.name}: {error}")
            continue
        if first is None:
            first = i, signature
            continue
        different = hard_differences(first[1], signature) + soft_differences(first[1], signature)
        lines += [f"{i.name} differs from {first[0].name}: {d}" for d in different]
    return lines
