"""No public function returns Any: what a type checker knows of an answer."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from ejkernel.types import MaskInfo

PACKAGES = ("types", "ops", "modules")
KERNELS = ("kernels.xla", "kernels.triton", "kernels.pallas")
# trees of any structure, for which no type says more
TREES = {"abstractify"}


def is_any(annotation: object) -> bool:
    return annotation is inspect.Signature.empty or str(annotation) in ("Any", "typing.Any")


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_say_what_they_return(package):
    module = importlib.import_module(f"ejkernel.{package}")
    functions = {n: getattr(module, n) for n in module.__all__ if n != "__version__"}
    functions = {n: f for n, f in functions.items() if inspect.isfunction(f)}
    assert functions
    returns = {n: inspect.signature(f).return_annotation for n, f in functions.items()}
    assert {n for n, annotation in returns.items() if is_any(annotation)} <= TREES


def test_masks_say_what_they_return():
    found = {}
    for name, value in vars(MaskInfo).items():
        function = value.fget if isinstance(value, property) else value
        if not name.startswith("_") and inspect.isfunction(function):
            found[name] = inspect.signature(function).return_annotation
    assert found and not [name for name, annotation in found.items() if is_any(annotation)]


@pytest.mark.parametrize("package", KERNELS)
def test_stubs_of_kernels_say_what_they_return(package):
    """Checkers read the stub of a kernel package; at runtime its functions are kernel objects."""
    (file,) = importlib.import_module(f"ejkernel.{package}").__path__
    tree = ast.parse((Path(file) / "__init__.pyi").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 15
    assert not [f.name for f in functions if f.returns is None or is_any(ast.unparse(f.returns))]
