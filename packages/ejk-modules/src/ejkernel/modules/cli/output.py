"""The output of commands, three ways: in colour through rich, in plain text, or as JSON.

rich is used where it is installed and standard output is a terminal. Progress and remarks go to
standard error, so that standard output can be piped. Much of the text comes from files: no control
character of it reaches the terminal.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "info": "cyan", "": ""}
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
            self._title(_line(text))

    def text(self, text: str, style: str = "") -> None:
        """Prints a paragraph as it is."""
        if not self.json:
            self._text(printable(text), style)

    def fields(self, rows: Sequence[tuple[str, Any]]) -> None:
        """Prints names and values."""
        if not self.json:
            self._fields([(_line(name), printable(str(value))) for name, value in rows])

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        right: Sequence[int] = (),
        optional: Sequence[int] = (),
    ) -> None:
        """Prints a table, or its rows one below the other where the terminal is too narrow.

        Args:
            columns: the names.
            rows: the cells.
            right: the columns that are right-aligned.
            optional: the columns that a narrow terminal goes without, the first of them first.
        """
        if self.json:
            return
        names, body = list(map(_line, columns)), [[cell_text(c) for c in row] for row in rows]
        widths = [max(map(len, column)) + 3 for column in zip(names, *body, strict=True)]
        left_out: list[int] = []
        for i in optional:
            if sum(widths) - 3 <= self._room():
                break
            widths[i] = 0
            left_out.append(i)
        if sum(widths) - 3 <= self._room():
            shown = [i for i in range(len(names)) if i not in left_out]
            cells = [[row[i] for i in shown] for row in body]
            right = [shown.index(i) for i in right if i in shown]
            self._table([names[i] for i in shown], cells, right)
            if left_out:
                missing = ", ".join(names[i] for i in sorted(left_out))
                self.note(f"the terminal is too narrow for: {missing}; --json has all")
            return
        for head, *cells in body:  # one below the other, so that no word is broken
            self._title(head)
            self._fields([(n, c) for n, c in zip(names[1:], cells, strict=True) if c])

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
                progress = _line(f"{label} {done}/{total} {text}")
                print(progress, file=sys.stderr, flush=True)

        yield advance

    # ---- how ---------------------------------------------------------------------------------

    def _room(self) -> float:
        """Returns the characters in a line of the terminal; a file's lines have no limit."""
        return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else math.inf

    def _remark(self, text: str, style: str) -> None:
        print(text, file=sys.stderr)

    def _title(self, text: str) -> None:
        print_line(f"\n{text}\n{'-' * len(text)}")

    def _text(self, text: str, style: str) -> None:
        print_line(text)

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


class RichOutput(Output):
    """Colours, frames and bars."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console

        self._console = Console(highlight=False)
        self._errors = Console(stderr=True, highlight=False)

    def _room(self) -> float:
        return self._console.width

    def _remark(self, text: str, style: str) -> None:
        # lines break between words; a path longer than a line stays whole, to be copied
        self._errors.print(text, style=style, markup=False, overflow="ignore", crop=False)

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Generator[Advance]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        columns = (
            TextColumn("{task.description}", "bold", markup=False), BarColumn(bar_width=32),
            MofNCompleteColumn(), Elapsed(), TextColumn("{task.fields[last]}", markup=False),
        )  # fmt: skip
        with Progress(*columns, console=self._errors, transient=True) as bar:
            task = bar.add_task(_line(label), total=total, last="")

            def advance(text: str, total: int | None = None) -> None:
                bar.update(task, advance=1, last=_line(text), total=total)

            yield advance

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.rule(_plain(text, "bold"), align="left", style="dim")

    def _text(self, text: str, style: str) -> None:
        self._console.print(text, style=STYLES.get(style, style) or None, markup=False)

    def _fields(self, rows: list[tuple[str, str]]) -> None:
        grid = self._grid()
        for name, value in rows:
            grid.add_row(_plain(name, "dim"), _plain(value))
        self._console.print(grid)

    def _table(self, columns: Sequence[str], rows: list[list[str]], right: Sequence[int]) -> None:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_plain(cell) for cell in row))
        self._console.print(table)

    def _checks(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        marks = {"ok": "✔", "warn": "!", "fail": "✘", "info": "·", "": ""}
        grid = self._grid()
        for status, subject, finding, fix in rows:
            value = _plain(finding)
            if fix and status in ("warn", "fail"):
                value.append(f"\n→ {fix}", style="bold " + STYLES[status].replace("bold ", ""))
            grid.add_row(_plain(f"{marks[status]} {subject}", STYLES[status]), value)
        self._console.print(grid)

    def _grid(self) -> Any:
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        return grid


def make_output(json: bool = False, plain: bool = False) -> Output:
    """Returns the richest output that the reader of standard output can show."""
    draws = (sys.stdout.encoding or "").lower().startswith("utf")  # rich's marks are not in ASCII
    if json or plain or not (draws and sys.stdout.isatty()):
        return Output(json)
    try:
        return RichOutput()
    except ImportError:
        return Output()


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


def _plain(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(text, style=style)


def cell_text(value: Any) -> str:
    """Returns the text of a cell of a table."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else _line(str(value))


def _line(text: str) -> str:
    return printable(text).replace("\n", " ")


def _hanging(text: str, indent: int) -> str:
    """``text`` wrapped to the terminal, later lines indented."""
    room = max(40, shutil.get_terminal_size((100, 24)).columns - indent)
    if len(text) <= room or not sys.stdout.isatty():
        return text
    return ("\n" + " " * indent).join(textwrap.wrap(text, room, break_long_words=False))
