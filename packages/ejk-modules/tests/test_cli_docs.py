"""Every `ejk` line in the documents and in the command's own help is one that it understands."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from ejkernel.modules.cli import app
from ejkernel.modules.workloads import find

ROOT = Path(__file__).parents[3]


def lines() -> list[str]:
    texts = [importlib.import_module(f"ejkernel.modules.cli.{c}").__doc__ for c in app.COMMANDS]
    for document in ("README.md", "docs/cli.md", "packages/ejk-modules/README.md"):
        if (ROOT / "docs").is_dir():
            texts += re.findall(r"```sh\n(.*?)```", (ROOT / document).read_text(), re.S)
    found = re.findall(r"^ *(ejk .*)$", "\n".join(texts), re.M)
    return [re.split(r" {3,}| #", line)[0].strip() for line in found]


@pytest.mark.parametrize("line", dict.fromkeys(lines()))
def test_the_line_is_understood(line):
    args = app.parse_words(shlex.split(line)[1:])
    operation = getattr(args, "operation", None)
    if operation is None:
        return
    name = find.operation_name(operation)
    shape = getattr(args, "shape", None) or getattr(args, "pattern", None)
    shapes = find.shapes_of(name, shape) if shape else [None]
    find.from_words(name, getattr(args, "words", []), shapes[0])
