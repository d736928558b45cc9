"""No import circles among the packages, inside functions and for annotations included."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sources() -> dict[str, str]:
    """Every module of the packages, by its name."""
    texts = {}
    for src in sorted(ROOT.glob("packages/*/src")):
        for path in sorted(src.rglob("*.py")):
            parts = path.relative_to(src).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            texts[name] = path.read_text()
    return texts


def imports(name: str, text: str, modules: Mapping[str, str]) -> set[str]:
    """The modules of ours that a module imports, at its top or inside functions."""
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if not isinstance(node, ast.ImportFrom):
            continue
        assert not node.level, f"{name}: imports here are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            imported.add(inner if inner in modules else str(node.module))
    return (imported & modules.keys()) - {name}


def circles(modules: Mapping[str, str]) -> list[str]:
    """Circles without a module in common, as ``a -> b -> a``, one at least of all that meet."""
    graph = {name: imports(name, text, modules) for name, text in modules.items()}
    found_circles = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return found_circles
        except CycleError as error:
            circle = error.args[1][::-1]  # each is imported by the one before
            found_circles.append(" -> ".join(circle))
            graph = {name: graph[name] - set(circle) for name in graph.keys() - set(circle)}


def test_no_package_imports_in_circles():
    assert circles(sources()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import a",
        "from a import x",
        "def f():\n    from a import x",
        "def f():\n    if y:\n        import a",
        "try:\n    import a\nexcept ImportError:\n    pass",
        "if TYPE_CHECKING:\n    from a import x",
    ],
)
def test_a_circle_is_found_wherever_the_import_stands(text):
    assert circles({"a": "from p import b", "p": "", "p.b": text}) == ["a -> p.b -> a"]
