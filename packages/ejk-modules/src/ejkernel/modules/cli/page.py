"""The frame of the report: one HTML file with its style inside, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from ejkernel.modules.cli.output import escape


def page(title: str, subtitle: str, tiles: Mapping[str, str], sections: Sequence[str]) -> str:
    """The whole document."""
    links = "".join(
        f'<a href="#{name}">{escape(words)}</a>' for name, words in map(_anchor, sections)
    )
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style()}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p><nav>{links}</nav></header>"
        f'<div class="tiles">{shown}</div>{"".join(sections)}</main></body></html>\n'
    )


def style() -> str:
    """Colours as variables, and what has them."""
    return resources.files("ejkernel.modules.cli").joinpath("page.css").read_text(encoding="utf-8")


def _anchor(section: str) -> tuple[str, str]:
    name = section.split('id="', 1)[1].split('"', 1)[0]
    return name, section.split("<h2>", 1)[1].split("</h2>", 1)[0]


def section(name: str, heading: str, why: str, *parts: str) -> str:
    """A card with a heading, a sentence on what it shows, and its parts."""
    return (
        f'<section id="{escape(name)}"><h2>{escape(heading)}</h2>'
        f'<p class="why">{escape(why)}</p>{"".join(parts)}</section>'
    )


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    numbers: Sequence[int] = (),
    code: Sequence[int] = (),
) -> str:
    """A table; cells that are ``Markup`` go in as they are. Empty columns are left out."""
    lines = [list(row) for row in rows]
    kept = [i for i in range(len(columns)) if not lines or any(_shown(x[i]) for x in lines)]

    def kind(i: int) -> str:
        return ' class="n"' if i in numbers else ""

    head = "".join(f"<th{kind(i)}>{escape(columns[i])}</th>" for i in kept)
    body = []
    for row in lines:
        cells = []
        for i in kept:
            value = row[i]
            text = value if isinstance(value, Markup) else escape(_shown(value))
            name = f' data-name="{escape(columns[i])}"' if columns[i] and text else ""
            cells.append(f"<td{kind(i)}{name}>{f'<code>{text}</code>' if i in code else text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'


class Markup(str):
    """Text that is HTML already."""


def tag(text: str) -> Markup:
    """A word in a frame."""
    return Markup(f'<span class="tag">{escape(text)}</span>')


def legend(colours: Mapping[str, str]) -> str:
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<div class="legend">{items}</div>'


def wide(svg: str) -> str:
    return f'<div class="wide">{svg}</div>'


def details(summary: str, *parts: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
