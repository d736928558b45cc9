"""The parser of ``ejk``; errors become one line without a traceback."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from typing import Any, NoReturn, cast

from ejkernel.modules.cli.interrupt import Interrupts
from ejkernel.modules.cli.output import (
    Output,
    OutputError,
    first_line,
    flush_output,
    no_device,
)

COMMANDS = {
    "doctor": "what is installed, what works, and the line that fixes what does not",
    "explain": "which implementation and configuration a call would get, and why",
    "shapes": "the named cases that explain, tune and bench know",
    "tune": "find the fastest configurations and keep them",
    "bench": "time an operation beside its peers, against what this machine can do",
    "cache": "list, show, export, import or clear tuned configurations",
    "report": "one HTML page: what ran, from which tier, how near to the bound",
    "completion": "a script that completes commands in bash, zsh or fish",
}

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """An error that the user should see as one line."""

    def __init__(self, message: str, status: int = USAGE):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    """A parser whose errors are JSON too with ``--json``."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        if Parser.as_json:
            make_output(json=True).data({"error": message})
        super().error(message)


class _Help(argparse.HelpFormatter):
    """Fits paragraphs of a description to the terminal; indented lines, examples, stay whole."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            "\n".join(indent + line for line in paragraph.splitlines())
            if paragraph.startswith(" ")
            else super(_Help, self)._fill_text(paragraph, width, indent)
            for paragraph in paragraphs
        )


def build_parser() -> argparse.ArgumentParser:
    """All subcommands with their arguments; imports their modules, none of which needs JAX."""
    from ejkernel.modules._version import __version__

    top = Parser(prog="ejk", description="Look into ejkernel: what runs here, why, and how fast.")
    top.add_argument("--version", action="version", version=f"ejk {__version__}")
    add_common_options(top, argparse.SUPPRESS)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"{__package__}.{name}")
        sub = commands.add_parser(name, help=summary, description=module.__doc__)
        sub.formatter_class = _Help
        module.arguments(sub)
        add_common_options(sub, argparse.SUPPRESS)
        sub.set_defaults(module=module)
    return top


def parse_words(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed words; ``key=value`` words may stand anywhere after the subcommand."""
    top = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        top.print_help()
        raise SystemExit(OK)
    Parser.as_json = "--json" in words
    # Taken out first, because argparse would let a subcommand's --import replace that of `ejk`.
    anywhere = Parser(prog="ejk", usage=_usage(top), add_help=False, allow_abbrev=False)
    add_common_options(anywhere)
    shared, words = anywhere.parse_known_args(words)
    args, extra = top.parse_known_args(words, shared)
    sizes = getattr(args, "words", None)
    stray = [w for w in extra if sizes is None or "=" not in w or w.startswith("-")]
    if stray:
        top.error(f"unrecognized arguments: {' '.join(stray)}")
    if sizes is not None:
        args.words = [*sizes, *extra]
        if "=" in (getattr(args, "shape", None) or ""):  # --shapes was meant without a name
            args.words.insert(0, args.shape)
            args.shape = "*"
    return args


def _usage(parser: argparse.ArgumentParser) -> str:
    return parser.format_usage().removeprefix("usage: ").rstrip()


def at_least_one(text: str) -> int:
    """A whole number >= 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}, expected a number >= 1")
    return int(text)


def seconds(text: str) -> float:
    """A time > 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"given {text}, expected seconds > 0")
    return value


def add_common_options(sub: argparse.ArgumentParser, nothing: Any = None) -> None:
    """Options of every command; ``nothing`` is the default of all of them."""
    group = sub.add_argument_group("output")
    flag: dict[str, Any] = {"action": "store_true", "default": nothing or False}
    group.add_argument("--json", help="print JSON and nothing else", **flag)
    group.add_argument("--plain", help="no colours, frames or bars", **flag)
    sub.add_argument(
        "--import", dest="imports", action="append", default=nothing or [], metavar="MODULE",
        help="import a module first, so that the kernels that it defines are known",
    )  # fmt: skip


def make_output(json: bool = False, plain: bool = False) -> Output:
    """Returns the richest output that the reader of standard output can show."""
    draws = (sys.stdout.encoding or "").lower().startswith("utf")  # rich's marks are not in ASCII
    if json or plain or not (draws and sys.stdout.isatty()):
        return Output(json)
    try:
        from ejkernel.modules.cli.rich_output import RichOutput
    except ImportError:  # of rich
        return Output()
    return RichOutput()


def _import_modules(names: Sequence[str]) -> None:
    """Imports the modules that ``--import`` names.

    The working folder may hold files of others: it is searched last, and only where Python would
    search it.
    """
    for name in names:
        try:
            spec = importlib.util.find_spec(name.partition(".")[0])
            if spec is None and not sys.flags.safe_path:
                sys.path.append(os.getcwd())
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            told = f"--import {name}: {type(error).__name__}: {error}"
            raise CommandError(told) from None


@contextlib.contextmanager
def _warnings_in_a_line(out: Output) -> Generator[None]:
    """Prints warnings of ejkernel as remarks, without the line of code they come from."""
    before = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
        if category.__module__.startswith("ejkernel."):
            out.note(str(message))
        else:
            before(message, category, *where, **options)

    warnings.showwarning = cast(Any, show)
    try:
        yield
    finally:
        warnings.showwarning = before


def run_cli(argv: Sequence[str] | None = None) -> int:
    """Parses, runs and prints; returns the exit status."""
    args = parse_words(argv)
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") is None:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # start-up messages of XLA are for its developers
    out = make_output(args.json, args.plain)
    try:
        with Interrupts() as interrupts, _warnings_in_a_line(out):
            status = _run_guarded(args, out, interrupts)
            flush_output()
            return status
    except BrokenPipeError:  # the reader, e.g. head, has seen enough
        _discard_output()
        return OK
    except OutputError as error:
        _discard_output()
        out.error(str(error))
        return USAGE


def _discard_output() -> None:
    """Drops buffered output, or Python would try to write it again at exit."""
    sys.stdout = open(os.devnull, "w")


def _run_guarded(args: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    try:
        _import_modules(args.imports)
        return args.module.run_command(args, out)
    except (BrokenPipeError, OutputError):
        raise
    except CommandError as error:
        return _fail(out, str(error), error.status)
    except KeyboardInterrupt:
        return _fail(out, "interrupted", INTERRUPTED)
    except Exception as error:
        message = "interrupted" if interrupts.seen else _actionable_message(error)
        if message is None:
            out.data({"error": f"{type(error).__name__}: {first_line(error)}"})
            raise
        return _fail(out, message, INTERRUPTED if interrupts.seen else USAGE)


def _fail(out: Output, message: str, status: int) -> int:
    if out.json:
        out.data({"error": message})
    out.error(message)
    return status


def _actionable_message(error: Exception) -> str | None:
    """Returns the message of an error that the user can act on; None for a bug."""
    from ejkernel.modules.workloads.find import UnknownName

    ours: tuple[type[Any], ...] = (UnknownName,)
    if "ejkernel.ops" in sys.modules:
        from ejkernel.ops import ConfigError, InvalidArgument, KernelNotFound, KernelNotSupported

        ours = (UnknownName, ConfigError, InvalidArgument, KernelNotFound, KernelNotSupported)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror or error}"
    # a wrong value on the command line is a ValueError of the function that it reaches
    if isinstance(error, ours) or type(error) is ValueError:
        return str(error)
    return (no_device() if "jax" in sys.modules else "") or None
