"""The parser of ``ejk``, and what happens to errors: one line, no traceback."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from ejkernel.modules.cli.output import Output, make_output

COMMANDS = {
    "doctor": "what is installed, what works, and the line that fixes what does not",
    "explain": "which implementation and configuration a call would get, and why",
    "shapes": "the named cases that explain, tune and bench know",
    "tune": "find the fastest configurations and keep them",
    "bench": "time an operation beside its peers, against what this machine can do",
    "cache": "list, show, export, import or clear tuned configurations",
    "report": "one HTML page: what ran, from which tier, how near to the bound",
}

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """What the user should know, in one line."""

    def __init__(self, message: str, status: int = USAGE):
        super().__init__(message)
        self.status = status


def parser() -> argparse.ArgumentParser:
    """All subcommands with their arguments; imports their modules, none of which needs JAX."""
    from ejkernel.modules._version import __version__

    top = argparse.ArgumentParser(
        prog="ejk", description="Look into ejkernel: what runs here, why, and how fast."
    )
    top.add_argument("--version", action="version", version=f"ejk {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"{__package__}.{name}")
        sub = commands.add_parser(name, help=summary, description=module.__doc__)
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        module.arguments(sub)
        _common(sub)
        sub.set_defaults(module=module)
    return top


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed words; ``key=value`` words may stand anywhere after the subcommand."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    words = getattr(args, "words", None)
    stray = [w for w in rest if words is None or "=" not in w or w.startswith("-")]
    if stray:
        top.error(f"unrecognized arguments: {' '.join(stray)}")
    if words is not None:
        args.words = [*words, *rest]
        if "=" in (getattr(args, "shape", None) or ""):  # --shapes was meant without a name
            args.words.insert(0, args.shape)
            args.shape = "*"
    return args


def _common(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON and nothing else")
    group.add_argument("--plain", action="store_true", help="no colours, frames or bars")


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and print; returns the exit status."""
    args = parse(argv)
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") is None:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA's start-up chatter is for its developers
    out = make_output(args.json, args.plain)
    try:
        return _guarded(args, out)
    except BrokenPipeError:  # the reader, e.g. head, has seen enough
        sys.stdout = open(os.devnull, "w")
        return OK


def _guarded(args: argparse.Namespace, out: Output) -> int:
    try:
        return args.module.run(args, out)
    except CommandError as error:
        return _fail(out, str(error), error.status)
    except KeyboardInterrupt:
        return _fail(out, "interrupted", INTERRUPTED)
    except Exception as error:
        known = _expected(error)
        if known is None:
            raise
        return _fail(out, known, USAGE)


def _fail(out: Output, message: str, status: int) -> int:
    if out.json:
        out.data({"error": message})
    out.error(message)
    return status


def _expected(error: Exception) -> str | None:
    """The message of an error that says by itself what is wrong; None for a bug."""
    from ejkernel.modules.workloads.find import UnknownName

    ours: tuple[type[Any], ...] = (UnknownName,)
    if "ejkernel.ops" in sys.modules:
        from ejkernel.ops import ConfigError, InvalidArgument, KernelNotFound, KernelNotSupported

        ours = (UnknownName, ConfigError, InvalidArgument, KernelNotFound, KernelNotSupported)
    # a wrong value on the command line is a ValueError of the function that it reaches
    if isinstance(error, ours) or type(error) is ValueError:
        return str(error)
    return None
