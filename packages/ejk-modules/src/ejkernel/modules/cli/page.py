"""The frame of the report: one HTML file with its style inside, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ejkernel.modules.cli.output import escape

STYLE = """
:root { color-scheme: light dark;
  --page:#f6f7f9; --card:#ffffff; --ink:#1b2330; --dim:#667085; --rule:#e4e7ec; --stripe:#f8f9fb;
  --accent:#2563eb; --ok:#12805c; --warn:#b54708; --fail:#c01048;
  --s1:#d97706; --s2:#7c3aed; --s3:#0e9384; --s4:#dd2590; --s5:#0086c9; --other:#98a2b3; }
@media (prefers-color-scheme: dark) { :root {
  --page:#10141b; --card:#181e28; --ink:#e6eaf0; --dim:#98a2b3; --rule:#2b3340; --stripe:#1c232e;
  --accent:#6ea0ff; --ok:#4cc38a; --warn:#f5b04c; --fail:#ff7a93;
  --s1:#f5a94a; --s2:#b692f6; --s3:#3ccbb8; --s4:#f670c7; --s5:#53b1fd; --other:#667085; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif; }
main { max-width:1120px; margin:0 auto; padding:32px 20px 64px; }
header h1 { font-size:24px; margin:0 0 4px; letter-spacing:-0.01em; }
header p { color:var(--dim); margin:0; }
nav { margin:14px 0 0; display:flex; flex-wrap:wrap; gap:4px 16px; }
nav a { color:var(--accent); text-decoration:none; }
nav a:hover { text-decoration:underline; }
h2 { font-size:17px; margin:0 0 2px; }
h3 { font-size:14px; margin:22px 0 6px; }
.why { color:var(--dim); margin:0 0 14px; max-width:80ch; }
section { background:var(--card); border:1px solid var(--rule); border-radius:12px;
  padding:20px 22px; margin-top:20px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(190px,1fr)); gap:14px;
  margin-top:20px; }
.tile { background:var(--card); border:1px solid var(--rule); border-radius:12px;
  padding:14px 18px; }
.tile b { display:block; font-size:24px; font-weight:650; letter-spacing:-0.02em;
  font-variant-numeric:tabular-nums; }
.tile span { color:var(--dim); }
.wide { overflow-x:auto; } .wide + .wide { margin-top:18px; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th { text-align:left; color:var(--dim); font-weight:550; white-space:nowrap; }
th,td { padding:5px 14px 5px 0; border-bottom:1px solid var(--rule); vertical-align:top; }
tr:last-child td { border-bottom:0; }
td.n,th.n { text-align:right; white-space:nowrap; }
code { font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
  overflow-wrap:anywhere; }
.ok { color:var(--ok); } .warn { color:var(--warn); } .fail { color:var(--fail); }
.info { color:var(--dim); }
.tag { display:inline-block; border:1px solid var(--rule); border-radius:99px; padding:0 9px;
  font-size:12px; color:var(--dim); white-space:nowrap; }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; margin:0 0 8px; color:var(--dim); }
.legend i { display:inline-block; width:10px; height:10px; border-radius:50%; margin-right:6px; }
details { margin-top:10px; } summary { cursor:pointer; color:var(--accent); }
svg { display:block; } svg text { font-size:12px; fill:var(--ink); }
svg .tick { fill:var(--dim); font-size:11px; } svg .panel { font-weight:600; }
svg .on { fill:#fff; } svg .stripe { fill:var(--stripe); } svg .void { fill:var(--stripe); }
@media (prefers-color-scheme: dark) { svg .on { fill:#0b1220; } }
svg .grid { stroke:var(--rule); } svg .range { stroke:var(--rule); stroke-width:2; }
svg .bound { stroke:var(--dim); stroke-dasharray:3 3; }
svg .winner { stroke:var(--ink); stroke-width:2.5; }
@media (max-width: 640px) {
  main { padding:16px 10px 40px; } section { padding:14px 12px; }
  table, tbody, tr, td { display:block; width:100%; } th { display:none; }
  tr { border-bottom:1px solid var(--rule); padding:8px 0; }
  td, td.n { border:0; padding:1px 0; text-align:left; white-space:normal; overflow-wrap:anywhere; }
  td[data-name]::before { content:attr(data-name) " "; color:var(--dim); }
}
"""


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
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p><nav>{links}</nav></header>"
        f'<div class="tiles">{shown}</div>{"".join(sections)}</main></body></html>\n'
    )


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


def tag(text: str, kind: str = "") -> Markup:
    """A word in a frame."""
    return Markup(f'<span class="tag {escape(kind)}">{escape(text)}</span>')


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
