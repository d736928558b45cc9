"""Plots as SVG text: dots against the bound, the spread of candidates, tiles as a heat map.

Colours are CSS variables of the page, so that the plots follow its light or dark scheme. Every
mark has a ``<title>``, which browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ejkernel.modules.cli.output import escape

WIDTH, LABEL_WIDTH, LETTERS = 1040, 230, 34
ROW = 26
MARK = 5.5


@dataclass(frozen=True)
class Dot:
    """A mark: ``x`` in the plot's unit, ``series`` gives its colour, ``hint`` its tooltip."""

    x: float
    series: str
    hint: str
    hollow: bool = False


@dataclass(frozen=True)
class Lane:
    """What one row shows in one panel: marks, and a few words at its right end."""

    marks: tuple[Dot, ...] = ()
    words: str = ""


@dataclass(frozen=True)
class Panel:
    """One column of a dot plot: a title, an upper end, tick values, and the sign after them."""

    title: str
    high: float
    ticks: tuple[float, ...]
    unit: str = "%"
    low: float = 0.0
    reference: float | None = None


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _rect(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {more}/>'


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    sizes = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {sizes} role="img">{"".join(parts)}</svg>'


def _clip(text: str) -> str:
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"


def dots(
    panels: Sequence[Panel], rows: Sequence[tuple[str, Sequence[Lane]]], colours: Mapping[str, str]
) -> str:
    """A dot plot: one column per panel, one line per row, ``(label, lane of each panel)``."""
    top, gap = 42, 86
    inner = (WIDTH - LABEL_WIDTH - gap * len(panels)) / len(panels)
    height = top + ROW * len(rows) + 10
    parts = []
    for i, (label, _) in enumerate(rows):
        y = top + ROW * i + ROW / 2
        if i % 2 == 0:
            parts.append(_rect(0, y - ROW / 2, WIDTH, ROW, 'class="stripe"'))
        clipped = text(4, y + 4, _clip(label), "label")
        parts.append(f"<g><title>{escape(label)}</title>{clipped}</g>")
    for p, panel in enumerate(panels):
        left = LABEL_WIDTH + p * (inner + gap)

        def place(x: float, panel: Panel = panel, left: float = left) -> float:
            share = (x - panel.low) / (panel.high - panel.low)
            return left + inner * min(max(share, 0.0), 1.0)

        parts.append(text(left, 14, panel.title, "panel"))
        for tick in panel.ticks:
            kind = "bound" if tick == panel.reference else "grid"
            parts.append(_line(place(tick), top - 6, place(tick), height - 8, kind))
            parts.append(text(place(tick), top - 12, f"{tick:g}{panel.unit}", "tick", "middle"))
        for i, (_, lanes) in enumerate(rows):
            y = top + ROW * i + ROW / 2
            words = lanes[p].words
            parts.append(text(left + inner + 14, y + 4, words, "tick"))
            marks = sorted(lanes[p].marks, key=lambda d: d.series == "ejkernel")
            if len(marks) > 1:
                ends = [place(d.x) for d in marks]
                parts.append(_line(min(ends), y, max(ends), y, "range"))
            parts += [_mark(place(d.x), y, d, colours.get(d.series, "var(--other)")) for d in marks]
    return _document(WIDTH, height, parts)


def _mark(x: float, y: float, dot: Dot, colour: str) -> str:
    paint = (
        f'fill="var(--card)" stroke="{colour}" stroke-width="2.2"'
        if dot.hollow
        else f'fill="{colour}" stroke="var(--card)" stroke-width="1.2"'
    )
    radius = MARK + 1 if dot.series == "ejkernel" else MARK
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {paint}/>'
    return f"<g><title>{escape(dot.hint)}</title>{circle}</g>"


def heat(
    across: Sequence[object],
    down: Sequence[object],
    cells: Mapping[tuple[object, object], float],
    names: tuple[str, str],
    best: tuple[object, object] | None,
) -> str:
    """Milliseconds by two tile sizes: the darker the faster; the winner has a frame."""
    side, tall, left, top = 76, 34, 96, 48
    width, height = left + side * len(across) + 12, top + tall * len(down) + 8
    low, high = min(cells.values()), max(cells.values())
    span = math.log(high / low) if high > low else 1.0
    parts = [text(left, 14, f"{names[0]} →", "tick"), text(4, top - 8, f"{names[1]} ↓", "tick")]
    for i, value in enumerate(across):
        parts.append(text(left + side * (i + 0.5), top - 8, str(value), "label", "middle"))
    for j, row in enumerate(down):
        y = top + tall * j
        parts.append(text(left - 10, y + tall / 2 + 4, str(row), "label", "end"))
        for i, column in enumerate(across):
            ms = cells.get((column, row))
            x = left + side * i
            field = (x + 1, y + 1, side - 2, tall - 2)
            if ms is None:
                parts.append(_rect(*field, 'rx="4" class="void"'))
                continue
            strength = 1.0 - 0.88 * math.log(ms / low) / span
            hint = escape(f"{names[0]}={column} {names[1]}={row}: {ms:.4f} ms")
            paint = f'rx="4" fill="var(--accent)" fill-opacity="{strength:.2f}"'
            paint += ' class="winner"' if (column, row) == best else ""
            kind = "on" if strength > 0.55 else "label"
            said = text(x + side / 2, y + tall / 2 + 4, f"{ms:.4g}", kind, "middle")
            parts.append(f"<g><title>{hint}</title>{_rect(*field, paint)}{said}</g>")
    return _document(width, height, parts)
