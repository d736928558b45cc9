"""The output of commands, three ways: in colour (``rich_output``), in plain text, or as JSON.

Colours are used where rich is installed and standard output is a terminal. Progress and remarks go
to standard error, so that standard output can be piped. Much of the text comes from files: no
control character of it reaches the terminal.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

MARKS = {"ok": "ok", "warn": "!!", "fail": "XX", "info": "--", "": ""}


def printable(text: str) -> str:
    """Returns ``text`` with control characters and terminal commands written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


class OutputError(Exception):
    """Standard output cannot be written, for example because the disk is full."""


@contextlib.contextmanager
def _writing_stdout() -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror or error}") from error


def print_line(text: str) -> None:
    """Prints on standard output; characters outside its encoding become escapes.

    Raises:
        OutputError: not written.
        BrokenPipeError: the reader has closed the pipe.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with _writing_stdout():
        print(text.encode(encoding, "backslashreplace").decode(encoding))


def flush_output() -> None:
    """Writes what standard output has buffered; raises as ``print_line`` does."""
    with _writing_stdout():
        sys.stdout.flush()


def write_file(path: Path, text: str) -> None:
    """Writes a file that the user named, whole or not at all.

    Raises:
        OSError: not written; its ``filename`` is the user's.
    """
    from ejkernel.ops.utils.files import write_output

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_output(path, text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class Advance(Protocol):
    """Callback of a finished step: its text, and the total where it was not known before."""

    def __call__(self, text: str, total: int | None = None) -> None: ...


class Output:
    """Plain text. ``json``: only ``data`` and ``error`` print."""

    _edges = 0  # characters of a table's line outside its columns

    def __init__(self, json: bool = False):
        self.json = json

    # ---- for machines -----------------------------------------------------------------------

    def data(self, content: Any) -> None:
        """Prints the result with ``--json``, else nothing."""
        if self.json:
            print_line(json.dumps(_finite(content), indent=1, default=str))

    # ---- for people -------------------------------------------------------------------------

    def title(self, text: str) -> None:
        """Prints a heading."""
        if not self.json:
            self._title(one_line(text))

    def text(self, text: str, style: str = "") -> None:
        """Prints a paragraph, its lines broken between words where the terminal is narrower."""
        if not self.json:
            self._text(printable(text), style)

    def fields(self, rows: Sequence[tuple[str, Any]]) -> None:
        """Prints names and values, which stand below their names where these leave no room."""
        if self.json:
            return
        fields = [(one_line(name), printable(str(value))) for name, value in rows]
        if max((len(name) for name, _ in fields), default=0) <= self._room() / 2:
            self._fields(fields)
            return
        for name, value in fields:
            self._text(name, "")
            self._fields([("", value)])

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        right: Sequence[int] = (),
        optional: Sequence[int] = (),
        headings: int = 0,
    ) -> None:
        """Prints a table, or its rows one below the other where the terminal is too narrow.

        Args:
            columns: the names.
            rows: the cells.
            right: the columns that are right-aligned.
            optional: the columns that a narrow terminal goes without, the first of them first.
            headings: how many of the first columns become headings over the rows that share
                them before any column is left out.
        """
        if self.json:
            return
        names, body = list(map(one_line, columns)), [[cell_text(c) for c in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(names, *body, strict=True)]
        first = 0 if self._fits(widths) else headings
        shown = self._shown(widths, first, [i for i in optional if i >= first])
        for heading, group in itertools.groupby(body, lambda row: row[:first]):
            if heading:
                self._title(", ".join(heading))
            if shown:
                cells = [[row[i] for i in shown] for row in group]
                right_aligned = [shown.index(i) for i in right if i in shown]
                self._table([names[i] for i in shown], cells, right_aligned)
                continue
            for row in group:  # one below the other, so that no word is broken
                self._title(row[first])
                below = zip(names[first + 1 :], row[first + 1 :], strict=True)
                self._fields([(name, cell) for name, cell in below if cell])
        missing = [name for i, name in enumerate(names) if i >= first and i not in shown]
        if shown and missing:
            self.note(f"the terminal is too narrow for: {', '.join(missing)}; --json has all")

    def _shown(self, widths: Sequence[int], first: int, optional: Sequence[int]) -> list[int]:
        """Returns the columns from ``first`` that fit a line, none if too many do not."""
        shown = list(range(first, len(widths)))
        left_out = []
        for i in optional:
            if self._fits([widths[j] for j in shown]):
                break
            shown.remove(i)
            left_out.append(i)
        if not self._fits([widths[j] for j in shown]):
            return []
        for i in reversed(left_out):  # a narrow one may fit in the place of a wide one
            if self._fits([widths[j] for j in (*shown, i)]):
                shown.append(i)
        return sorted(shown)

    def _fits(self, widths: Sequence[int]) -> bool:
        return sum(widths) + 3 * (len(widths) - 1) + self._edges <= self._room()

    def checks(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        """``(status, what, found, fix)`` per line; the fix only where something is wrong."""
        if not self.json:
            self._checks([(a, printable(b), printable(c), printable(d)) for a, b, c, d in rows])

    def note(self, text: str) -> None:
        """Prints a remark on standard error, also with ``--json``."""
        self._remark(f"ejk: {printable(text)}", "yellow")

    def error(self, text: str) -> None:
        """Prints why the command failed on standard error."""
        self._remark(f"ejk: {printable(text)}", "bold red")

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Generator[Advance]:
        """A bar of ``total`` steps on standard error; call the yielded function after each."""
        done = 0

        def advance(text: str, total: int | None = total) -> None:
            nonlocal done
            done += 1
            if not self.json:
                progress = one_line(f"{label} {done}/{total} {text}")
                print(progress, file=sys.stderr, flush=True)

        yield advance

    # ---- how ---------------------------------------------------------------------------------

    def _room(self) -> float:
        """Returns the characters in a line of the terminal; a file's lines have no limit."""
        return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else math.inf

    def _remark(self, text: str, style: str) -> None:
        width = shutil.get_terminal_size((100, 24)).columns if sys.stderr.isatty() else None
        print(wrap_lines(text, width), file=sys.stderr)

    def _title(self, text: str) -> None:
        print_line(f"\n{text}\n{'-' * len(text)}")

    def _text(self, text: str, style: str) -> None:
        room = self._room()
        print_line(wrap_lines(text, None if math.isinf(room) else int(room)))

    def _fields(self, rows: list[tuple[str, str]]) -> None:
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            print_line(f"{name.ljust(width)}  {_hanging(value, width + 2)}")

    def _table(self, columns: Sequence[str], rows: list[list[str]], right: Sequence[int]) -> None:
        table = [list(columns), *rows]
        widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
        for line in table:
            cells = [
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            print_line("  ".join(cells).rstrip())

    def _checks(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        width = max((len(subject) for _, subject, _, _ in rows), default=0)
        for status, subject, finding, fix in rows:
            print_line(f"{MARKS[status]}  {subject.ljust(width)}  {_hanging(finding, width + 6)}")
            if fix and status in ("warn", "fail"):
                print_line(f"{' ' * (width + 6)}fix: {fix}")


def _finite(content: Any) -> Any:
    """Returns ``content`` with None for floats that are not finite, which JSON cannot hold."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return content


def counted(number: int, noun: str) -> str:
    """ "1 config", "2 configs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its name."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def no_device() -> str:
    """Returns why JAX finds no device at all; "" where there is one."""
    try:
        import jax

        jax.devices()
    except AssertionError:  # JAX's message for a platform without an installed plugin
        platforms = jax.config.jax_platforms or ""  # ty: ignore[missing-attribute]
        return f"JAX finds no device (JAX_PLATFORMS={platforms})"
    except Exception as error:
        return first_line(error)
    return ""


def cell_text(value: Any) -> str:
    """Returns the text of a cell of a table."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value))


def one_line(text: str) -> str:
    return printable(text).replace("\n", " ")


def _hanging(text: str, indent: int) -> str:
    """``text`` wrapped to the terminal, later lines indented."""
    room = max(20, shutil.get_terminal_size((100, 24)).columns - indent)
    wrapped = wrap_lines(text, room if sys.stdout.isatty() else None)
    return wrapped.replace("\n", "\n" + " " * indent)


def wrap_lines(text: str, width: int | None) -> str:
    """``text`` with lines broken between words; a longer word, such as a path, stays whole."""
    if width is None or len(text) <= width:
        return text
    fill = functools.partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    return "\n".join(fill(line, width) if len(line) > width else line for line in text.split("\n"))
