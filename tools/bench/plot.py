"""A picture of one run: each contender's share of the bound, case by case.

python -m bench.plot RESULTS.json ...      writes RESULTS.png beside each
"""

from __future__ import annotations

import json
import pathlib
import sys

from ejkernel.modules.bench.record import rates_text

COLOURS = ("#2563eb", "#d97706", "#7c3aed", "#0e9384", "#dd2590", "#667085")
TITLES = {"fwd": "forward", "fwd+bwd": "forward + backward"}
INK, DIM, RULE = "#1b2330", "#667085", "#e4e7ec"
ROW = 0.3  # inches


def figure(result: dict):
    """A matplotlib figure of a result."""
    from matplotlib.figure import Figure

    rows = [r for r in result["rows"] if r.get("ms") is not None]
    cases = list(dict.fromkeys(r["case"] for r in rows))
    modes = list(dict.fromkeys(r["mode"] for r in rows)) or ["fwd"]
    contenders = list(dict.fromkeys(r["contender"] for r in rows))
    fig = Figure(figsize=(4.2 + 3.1 * len(modes), 1.35 + ROW * max(len(cases), 1)), dpi=160)
    axes = fig.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    high = max([100.0, *(min(r["percent_of_limit"], 150.0) for r in rows)])
    for ax, mode in zip(axes, modes, strict=True):
        _panel(ax, [r for r in rows if r["mode"] == mode], cases, contenders)
        ax.set_title(TITLES.get(mode, mode), loc="left", fontsize=9, color=INK, weight="bold")
        ax.set_xlim(0, high * 1.03)
    axes[0].set_yticks(range(len(cases)), cases, fontsize=8, color=INK)
    axes[0].set_ylim(len(cases) - 0.4, -0.6)
    fig.text(
        0.01, 1 - 0.06 / fig.get_figheight(),
        f"{result['op']}: percent of the bound measured in the same run",
        ha="left", va="top", fontsize=10, color=INK, weight="bold",
    )  # fmt: skip
    fig.text(
        0.01, 1 - 0.27 / fig.get_figheight(),
        f"{result['device']}, {result['date']}; {rates_text(result.get('limits', {}))}",
        ha="left", va="top", fontsize=7.5, color=DIM,
    )  # fmt: skip
    handles, names = axes[0].get_legend_handles_labels()
    fig.legend(
        handles, names, loc="upper right", ncols=len(names), fontsize=8, frameon=False,
        handletextpad=0.1, columnspacing=1.0, bbox_to_anchor=(0.995, 1.0),
    )  # fmt: skip
    fig.tight_layout(rect=(0, 0, 1, 1 - 0.48 / fig.get_figheight()), w_pad=2.5)
    return fig


def _panel(ax, rows, cases, contenders) -> None:
    for y, case in enumerate(cases):
        values = [r["percent_of_limit"] for r in rows if r["case"] == case]
        if len(values) > 1:
            ax.hlines(y, min(values), max(values), color=RULE, lw=2, zorder=1)
    for i, name in enumerate(contenders):
        mine = [r for r in rows if r["contender"] == name]
        ax.scatter(
            [r["percent_of_limit"] for r in mine],
            [cases.index(r["case"]) for r in mine],
            s=42 if i == 0 else 28, color=COLOURS[min(i, len(COLOURS) - 1)], label=name,
            zorder=3 if i == 0 else 2, edgecolors="white", linewidths=0.7,
        )  # fmt: skip
    ax.axvline(100, color=DIM, lw=0.8, ls=(0, (3, 3)), zorder=0)
    ax.xaxis.set_major_formatter("{x:.0f}%")
    ax.tick_params(axis="both", length=0, labelsize=8, labelcolor=DIM)
    ax.grid(axis="x", color=RULE, lw=0.6)
    ax.set_axisbelow(True)
    for side in ax.spines.values():
        side.set_visible(False)


def write(path: pathlib.Path) -> pathlib.Path:
    """The picture of a JSON result, beside it."""
    result = json.loads(path.read_text())
    picture = path.with_suffix(".png")
    figure(result).savefig(picture, metadata={"Software": None})
    return picture


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(write(pathlib.Path(name)))
