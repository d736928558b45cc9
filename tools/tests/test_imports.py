"""No import circles among the packages, neither at the top of a file nor inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sources() -> dict[str, str]:
    """Every module of the packages, by its name."""
    found = {}
    for src in sorted(ROOT.glob("packages/*/src")):
        for path in sorted(src.rglob("*.py")):
            parts = path.relative_to(src).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text()
    return found


def executed(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports below a node that can run: those of a type checker are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from executed(ast.Module([other], []))
        else:
            yield from executed(child)


def imports(name: str, text: str, known: Mapping[str, str]) -> set[str]:
    """The modules of ours that a module imports, wherever it does so."""
    found = set()
    for node in executed(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        assert not node.level, f"{name}: imports here are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            found.add(inner if inner in known else str(node.module))
    return (found & known.keys()) - {name}


def circles(modules: Mapping[str, str]) -> list[str]:
    """One circle for each group of modules that reach each other, as ``a -> b -> a``."""
    graph = {name: imports(name, text, modules) for name, text in modules.items()}

    def way(start: str, end: str) -> list[str]:
        """The shortest way from one module to another; empty without one."""
        came: dict[str, str] = {}
        front = [start]
        while front and end not in came:
            step = [(a, b) for a in front for b in sorted(graph[a]) if b not in came]
            for a, b in step:
                came.setdefault(b, a)
            front = list(dict.fromkeys(b for _, b in step))
        if end not in came:
            return []
        path = [end]
        while len(path) == 1 or path[-1] != start:
            path.append(came[path[-1]])
        return path[::-1]

    found, told = [], set()
    for name in graph:
        path = [] if name in told else way(name, name)
        if path:
            told |= {other for other in graph if way(name, other) and way(other, name)}
            found.append(" -> ".join(path))
    return found


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
        "if TYPE_CHECKING:\n    pass\nelse:\n    import a",
    ],
)
def test_a_circle_is_found_wherever_the_import_stands(text):
    assert circles({"a": "from p import b", "p": "", "p.b": text}) == ["a -> p.b -> a"]


def test_what_only_a_type_checker_reads_makes_no_circle():
    assert circles({"a": "import b", "b": "if TYPE_CHECKING:\n    from a import x"}) == []
