"""The named cases: calls with the shapes of real models, and small ones for CPUs.

ejk shapes
ejk shapes flash_attention 'llama*'
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ejkernel.modules.cli.output import Output

_OUTSIDE = ("name", "source", "device")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operation", nargs="?", metavar="OP")
    parser.add_argument("pattern", nargs="?", default="*", metavar="GLOB")


def run_command(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.workloads import find

    if args.operation is None:
        counts = {name: len(find.shapes_of(name)) for name in find.operation_names()}
        out.data(counts)
        out.table(("operation", "shapes"), list(counts.items()), right=(1,))
        return 0
    name = find.operation_name(args.operation)
    shapes = find.shapes_of(name, args.pattern)
    out.data([dataclasses.asdict(s) for s in shapes])
    rows = [(s.name, s.device, _sizes_text(s), s.source) for s in shapes]
    out.table(("shape", "for", "sizes", "source"), rows)
    return 0


def _sizes_text(shape: Any) -> str:
    """Returns the fields that are not at their defaults."""
    words = []
    for f in dataclasses.fields(shape):
        value = getattr(shape, f.name)
        if f.name not in _OUTSIDE and value != f.default:
            words.append(f"{f.name}={value}")
    return " ".join(words)
