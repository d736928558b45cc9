"""A checkout as if its packages were installed: for machines that have no more than its files."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUP = "ejkernel.kernels"


def use(root: Path = ROOT) -> None:
    """Import the packages and tools of this folder."""
    paths = map(str, (*sorted(root.glob("packages/*/src")), root / "tools"))
    sys.path[:0] = [path for path in paths if path not in sys.path]


def register(root: Path = ROOT) -> None:
    """Register its kernel packages when none is installed."""
    from ejkernel.ops import kernel_registry

    if entry_points(group=GROUP):
        return
    for project in sorted(root.glob("packages/*/pyproject.toml"), reverse=True):
        declared = tomllib.loads(project.read_text())["project"].get("entry-points", {})
        for name, value in declared.get(GROUP, {}).items():
            EntryPoint(name, value, GROUP).load()(kernel_registry)
