"""Arguments that several subcommands share: an operation, and cases or ``key=value`` words."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ejkernel.modules.cli.output import Output

if TYPE_CHECKING:
    from ejkernel.modules.workloads.call import Call

KEYS = (
    "Sizes by name: b=2 s=4k h=32 hk=8 d=128 dtype=bfloat16, or any argument of the operation "
    "that is no array: causal=true platform=triton."
)


def add_arguments(parser: argparse.ArgumentParser, *, operation_optional: bool = False) -> None:
    """``OP [--shape NAME] [key=value ...]``."""
    optional: dict[str, Any] = {"nargs": "?"} if operation_optional else {}
    parser.add_argument("operation", metavar="OP", help="e.g. flash_attention", **optional)
    # a default, or argparse says of a missing OP that words are missing too
    parser.add_argument("words", nargs="*", default=[], metavar="key=value", help=KEYS)
    parser.add_argument(
        "--shape", "--shapes", dest="shape", nargs="?", const="*", metavar="NAME",
        help="named cases or globs, comma-separated; without a name, all cases for this device",
    )  # fmt: skip


def calls_of(operation: str, pattern: str | None, words: list[str]) -> list[Call]:
    """The calls that the command line describes.

    A glob gives the cases meant for the device at hand; a full name gives that case anywhere.

    Raises:
        UnknownName: an operation, a case or a key that does not exist.
        ValueError: a value of the wrong kind.
    """
    from ejkernel.modules.workloads import find

    name = find.operation_name(operation)
    if pattern is None:
        return [find.from_words(name, words)]
    shapes = []
    for glob in pattern.split(","):
        matching = find.shapes_of(name, glob)
        if any(c in glob for c in "*?["):
            matching = find.shapes_of(name, glob, find.device_meant()) or matching
        shapes += [shape for shape in matching if shape not in shapes]
    return [find.from_words(name, words, base=shape) for shape in shapes]


def note_devices(out: Output, calls: list[Call]) -> None:
    """Say so when cases meant for a GPU meet a machine without one; then go on."""
    from ejkernel.ops import device_fingerprint, device_kind

    if device_kind() == "cpu" and any(c.device == "gpu" for c in calls):
        out.note(f"no GPU here: what follows is about {device_fingerprint()}")


def sizes_text(call: Call) -> str:
    """The arrays of a call in one line: ``query bf16[4,4096,32,128] ...``."""
    import jax
    import numpy as np

    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "b"}
    words = []
    arguments = call.abstract()
    for name in call.names:
        for leaf in jax.tree_util.tree_leaves(arguments[name]):
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                kind = leaf.dtype.name if hasattr(leaf.dtype, "name") else str(leaf.dtype)
                head = kind.rstrip("0123456789")
                kind = short.get(head, head) + kind[len(head) :]
                words.append(f"{name} {kind}[{','.join(map(str, np.shape(leaf)))}]")
    return " ".join(words)
