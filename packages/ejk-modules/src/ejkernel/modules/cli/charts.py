"""Charts of measured calls and of tuning candidates, drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ejkernel.modules.bench.record import PEER_NAMES
from ejkernel.modules.cli.output import printable

Row = Mapping[str, Any]

MAX_PERCENT = 150.0
MAX_RATIO = 3.0
MODES = {"fwd": "forward", "fwd+bwd": "forward + backward"}
# names in records come from files, so "$" starts no formula
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "ejkernel", "text.parse_math": False}


@matplotlib.rc_context(STYLE)
def bound_chart(rows: Sequence[Row], title: str = "") -> str:
    """Returns an SVG with each contender's percent of the bound, case by case and mode by mode.

    ``rows`` have a time. The time of ejkernel stands at the right end of its line.
    """
    rows = [r for r in rows if r.get("percent_of_limit") is not None]
    cases, modes, contenders = (_distinct(rows, key) for key in ("case", "mode", "contender"))
    figure, axes = _new_figure(cases, max(len(modes), 1), title)
    for axis, mode in zip(axes, modes, strict=False):
        for i, name in enumerate(contenders):
            ours = name == "ejkernel"
            contender_rows = [r for r in rows if (r["mode"], r["contender"]) == (mode, name)]
            percents = [min(max(r["percent_of_limit"], 0.0), MAX_PERCENT) for r in contender_rows]
            positions = [cases.index(r["case"]) for r in contender_rows]
            label = printable(PEER_NAMES.get(name, name))
            axis.scatter(percents, positions, 45 if ours else 25, f"C{i}", label=label,
                         zorder=4 if ours else 3)  # fmt: skip
            for r, line in zip(contender_rows, positions, strict=True):
                if ours:
                    _write_at_end(axis, line, time_text(r["ms"]))
        axis.axvline(100.0, color="gray", linestyle="--")
        axis.set(title=printable(MODES.get(mode, mode)), xlabel="% of the bound")
        axis.set_xlim(left=0.0, right=max(105.0, axis.get_xlim()[1]))
    _add_legend(figure, axes[0])
    return to_svg(figure)


@matplotlib.rc_context(STYLE)
def candidates_chart(calls: Sequence[Mapping[str, Any]]) -> str:
    """Returns an SVG with every candidate's time over that of the winner, call by call."""
    figure, (axis,) = _new_figure([f"{c['operation']} {c['shape']}" for c in calls], 1, "")
    for line, call in enumerate(calls):
        timed = [t["ms"] for t in call["trials"] if t["ms"] is not None]
        ratios = [min(ms / call["best_ms"], MAX_RATIO) for ms in timed]
        axis.scatter(ratios, [line] * len(ratios), 20, "lightgray", label="candidate")
        if call["trials"] and call["trials"][0]["ms"] is not None:
            axis.scatter(ratios[:1], [line], 45, "none", edgecolors="C1", label="heuristic")
        axis.scatter([1.0], [line], 45, "C0", label="winner", zorder=4)
        _write_at_end(axis, line, time_text(call["best_ms"]))
    axis.axvline(1.15, color="gray", linestyle="--")
    axis.set(xlim=(0.95, MAX_RATIO + 0.05), xlabel="time over the winner's")
    _add_legend(figure, axis)
    return to_svg(figure)


def time_text(ms: float) -> str:
    """Returns a time in milliseconds, or in microseconds if it is short."""
    return f"{ms:.4g} ms" if ms >= 0.1 else f"{1e3 * ms:.4g} µs"


def _distinct(rows: Sequence[Row], key: str) -> list[str]:
    return list(dict.fromkeys(r[key] for r in rows))


def _new_figure(labels: Sequence[str], columns: int, title: str) -> tuple[Figure, list[Axes]]:
    """Returns a figure with a horizontal line for each label, and its axes side by side."""
    top, bottom = 1.0 if title else 0.7, 0.5
    height = 0.28 * len(labels) + top + bottom
    figure = Figure(figsize=(11.0, height))
    figure.subplots_adjust(0.25, bottom / height, 0.92, 1 - top / height, wspace=0.25)
    figure.suptitle(printable(title), x=0.01, y=1 - 0.1 / height, ha="left", fontsize=10)
    axes = list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])
    axes[0].set_yticks(range(len(labels)), map(printable, labels))
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    for axis in axes:
        axis.grid(axis="x", alpha=0.4)
        for line in range(0, len(labels), 2):
            axis.axhspan(line - 0.5, line + 0.5, color="0.97", zorder=0)
    return figure, axes


def _write_at_end(axis: Axes, line: int, text: str) -> None:
    axis.annotate(text, (1.01, line), xycoords=("axes fraction", "data"), va="center", fontsize=8)


def _add_legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    layout = {"loc": "upper right", "ncols": 6, "frameon": False, "fontsize": 9}
    figure.legend(unique.values(), unique.keys(), **layout)


def to_svg(figure: Figure) -> str:
    """Returns the drawing without what differs between two runs."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return out.getvalue()[out.getvalue().index("<svg") :]
