"""Write the stubs that type checkers read next to the sources, made from the sources.

An operation whose flag (``return_lse``, ``return_state``) changes what it returns has a stub with
overloads, made from the signature in its module. A package that imports its names on first use has
a stub that imports them, a kernel package one with its functions:

    stubs.py            name the stubs that are out of date
    stubs.py --write    bring them up to date
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import generated
from ejkernel import modules
from ejkernel.types import calls

KERNELS = ("xla", "triton", "pallas")
EXECUTION = ("platform", "mesh", "in_specs", "out_specs")  # arguments of modules, not of kernels
OPERATIONS = generated.ROOT / "packages/ejk-modules/src/ejkernel/modules/operations"
FLAGS = ("return_lse", "return_state")


def stub_of(module: Path) -> str | None:
    """The text of the stub of a module; None where no flag changes what the operation returns."""
    text = module.read_text()
    tree = ast.parse(text)
    functions = [d for d in tree.body if isinstance(d, ast.FunctionDef) and d.name[0] != "_"]
    flag = next((f for f in FLAGS if f"{f}: bool = False,\n" in text), None)
    if flag is None:
        return None
    definitions = []
    for function in functions:
        head = _head(text, function)
        if function.name == module.stem:
            overloads = _overloads(head, flag, function.returns)
            definitions += [f"@overload\n{overload}" for overload in overloads]
        else:
            definitions.append(head)
    for d in tree.body:
        if isinstance(d, ast.ClassDef) and d.name[0] != "_":
            bases = ", ".join(map(ast.unparse, d.bases))
            definitions.append(f"\nclass {d.name}({bases}): ...")
    body = "\n".join(definitions) + "\n"
    imports = "\n".join(_imports(tree, body))
    return f"# Made from {module.name} by tools/stubs.py --write.\n{imports}\n\n{body}"


def _head(text: str, function: ast.FunctionDef) -> str:
    """Returns the function as far as its docstring, without its ``**unknown``."""
    head = text.splitlines()[function.lineno - 1 : function.body[0].lineno - 1]
    return "\n".join(head).replace("    **unknown: Never,\n", "").rstrip() + " ..."


def _overloads(head: str, flag: str, returns: ast.expr | None) -> list[str]:
    if not isinstance(returns, ast.BinOp):
        raise ValueError(f"expected the types without and with {flag} as A | B:\n{head}")
    without, extra = f") -> {ast.unparse(returns.left)}", f") -> {ast.unparse(returns.right)}"
    either, usual = f"{without} | {ast.unparse(returns.right)}", f"{flag}: bool = False"
    return [
        head.replace(usual, f"{flag}: Literal[False] = False").replace(either, without),
        head.replace(usual, f"{flag}: Literal[True]").replace(either, extra),
        head.replace(usual, f"{flag}: bool"),
    ]


def _imports(tree: ast.Module, body: str) -> list[str]:
    """The module's imports that the stub needs, and typing's two words for overloads."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    groups: list[list[str]] = [[]]
    end = 0
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [(a.name, a.asname or a.name) for a in node.names]
        source = node.module if isinstance(node, ast.ImportFrom) else names[0][0]
        if node.lineno > end + 1:  # a blank line between groups
            groups.append([])
        end = node.end_lineno or 0
        if source == "typing":
            names += [(word, word) for word in ("Literal", "overload")]
        used_names = sorted(
            {n if n == as_ else f"{n} as {as_}" for n, as_ in names if as_.split(".")[0] in used},
            key=lambda n: (not n[0].isupper(), n.lower()),
        )
        if used_names and isinstance(node, ast.Import):
            groups[-1].append(f"import {used_names[0]}")
        elif used_names:
            groups[-1].append(f"from {source} import {', '.join(used_names)}")
    return "\n\n".join("\n".join(group) for group in groups if group).splitlines()


def stub_of_package(where: Mapping[str, tuple[str, str]]) -> str:
    """The stub of a package with these names; of each its module, and its name there."""
    imports = [f"from {module} import {name} as {ours}" for ours, (module, name) in where.items()]
    head = "# Made by tools/stubs.py --write.\n# ruff: noqa\n# fmt: off\n"
    return head + "\n".join(sorted(imports)) + "\n"


def stub_of_kernels(package: ModuleType) -> str:
    """The stub of a kernel package: each function's arguments are its operation's and a config.

    Many of the functions have the name of a folder, which type checkers would take for a module.
    """
    imports: dict[str, set[str]] = {"typing": {"Any"}}
    body = ""
    for name in package.PACKAGE.functions:
        text = (OPERATIONS / f"{name}.py").read_text()
        head = _kernel_of(name, text)
        body += f"{head}\n"
        for line in filter(None, _imports(ast.parse(text), head)):
            source, _, names = line.removeprefix("from ").partition(" import ")
            imports.setdefault(source, set()).update(filter(None, names.split(", ")))
    lines = [
        f"from {source} import {', '.join(sorted(names))}" if names else source
        for source, names in sorted(imports.items(), key=lambda item: (bool(item[1]), item[0]))
    ]
    return (
        "# Made by tools/stubs.py --write.\n# ruff: noqa\n# fmt: off\n"
        + "\n".join(lines)
        + f"\nfrom {package.__name__}._version import __version__ as __version__\n"
        + "from ejkernel.ops.packages import KernelPackage\n\n"
        + f"PACKAGE: KernelPackage\n\ndef register(registry: Any) -> None: ...\n{body}"
    )


def _kernel_of(name: str, text: str) -> str:
    """Returns the definitions of an operation's function as kernel packages have it."""
    functions = [d for d in ast.parse(text).body if isinstance(d, ast.FunctionDef)]
    function = next(d for d in functions if d.name == name)
    head = re.sub(rf"^    (?:{'|'.join(EXECUTION)}): .*,\n", "", _head(text, function), flags=re.M)
    head = re.sub("^    cfg: .*,$", "    cfg: Any = None,", head, flags=re.M)
    flag = next((f for f in FLAGS if f"{f}: bool = False,\n" in head), None)
    if flag is None:
        return head
    return "\n".join(f"@overload\n{x}" for x in _overloads(head, flag, function.returns))


def packages() -> dict[Path, str]:
    """The stubs of packages."""
    version = {"__version__": ("ejkernel.modules._version", "__version__")}
    members = {
        name: (f"{calls.__name__}.{home}", name) for name, home in vars(calls)["MODULES"].items()
    }
    public = vars(modules)["WHERE"] | version
    stubs: dict[ModuleType, str] = {
        modules: stub_of_package(public),
        calls: stub_of_package(members),
    }
    for name in KERNELS:
        package = importlib.import_module(f"ejkernel.kernels.{name}")
        stubs[package] = stub_of_kernels(package)
    return {Path(package.__file__ or "").with_suffix(".pyi"): x for package, x in stubs.items()}


def main(argv: list[str] | None = None) -> int:
    stubs = {m.with_suffix(".pyi"): stub_of(m) for m in sorted(OPERATIONS.glob("*.py"))}
    return generated.main(packages() | stubs, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
