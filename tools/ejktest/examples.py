"""Loading the programs of docs/examples into a test."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples"


def load_example(name: str) -> ModuleType:
    """Returns a program of the folder as a module, its ``__main__`` part not run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def is_png(path: pathlib.Path) -> bool:
    """Returns whether a file is a picture that a program drew."""
    return path.read_bytes().startswith(b"\x89PNG")
