"""The output of commands in colour, by rich."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ejkernel.modules.cli.output import Advance, Output, one_line, wrap_lines

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "info": "cyan", "": ""}


class RichOutput(Output):
    """Colours, frames and bars."""

    _edges = 2

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(highlight=False)
        self._errors = Console(stderr=True, highlight=False)

    def _room(self) -> float:
        return self._console.width

    def _remark(self, text: str, style: str) -> None:
        wrapped = wrap_lines(text, self._errors.width if self._errors.is_terminal else None)
        self._errors.print(wrapped, style=style, markup=False, overflow="ignore", crop=False)

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Generator[Advance]:
        columns = (
            TextColumn("{task.description}", "bold", markup=False), BarColumn(bar_width=32),
            MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[last]}", markup=False),
        )  # fmt: skip
        with Progress(*columns, console=self._errors, transient=True) as bar:
            task = bar.add_task(one_line(label), total=total, last="")

            def advance(text: str, total: int | None = None) -> None:
                bar.update(task, advance=1, last=one_line(text), total=total)

            yield advance

    def _title(self, text: str) -> None:
        self._console.print()
        self._console.rule(Text(text, "bold"), align="left", style="dim")

    def _text(self, text: str, style: str) -> None:
        self._console.print(text, style=STYLES.get(style, style) or None, markup=False)

    def _fields(self, rows: list[tuple[str, str]]) -> None:
        grid = self._grid()
        for name, value in rows:
            grid.add_row(Text(name, "dim"), Text(value))
        self._console.print(grid)

    def _table(self, columns: Sequence[str], rows: list[list[str]], right: Sequence[int]) -> None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)

    def _checks(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        marks = {"ok": "✔", "warn": "!", "fail": "✘", "info": "·", "": ""}
        grid = self._grid()
        for status, subject, finding, fix in rows:
            value = Text(finding)
            if fix and status in ("warn", "fail"):
                value.append(f"\n→ {fix}", style="bold " + STYLES[status].replace("bold ", ""))
            grid.add_row(Text(f"{marks[status]} {subject}", STYLES[status]), value)
        self._console.print(grid)

    def _grid(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        return grid
