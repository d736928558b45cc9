"""Chart of one run: each contender's percent of the bound, case by case.

python -m bench.plot RESULTS.json ...      writes RESULTS.svg next to each

Of ``scaling.json``: the rate of each of several devices over that of one, by their number.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from bench.scaling_cases import COMPILED, SENDS
from ejkernel.modules.bench.record import rates_text
from ejkernel.modules.cli.charts import MODES, STYLE, Row, bound_chart, to_svg


def write_chart(path: pathlib.Path) -> pathlib.Path:
    """Draws the result in a JSON file and returns the path of the SVG."""
    result = json.loads(path.read_text())
    drawing = path.with_suffix(".svg")
    if "op" not in result:
        drawing.write_text(scaling_chart(result["rows"], result["device"]), encoding="utf-8")
        return drawing
    title = (
        f"{result['op']}: percent of the bound measured in the same run\n"
        f"{result['device']}, {result['date']}; {rates_text(result.get('limits', {}))}"
    )
    timed = [r for r in result["rows"] if r.get("ms") is not None]
    drawing.write_text(bound_chart(timed, title), encoding="utf-8")
    return drawing


@matplotlib.rc_context(STYLE)
def scaling_chart(rows: Sequence[Row], device: str) -> str:
    """Returns an SVG with a line for each call that several devices ran with default options.

    Calls whose devices share a sequence have panels of their own.
    """
    rows = [r for r in rows if r["kind"] == "together" and r["share"] is not None]
    cases = dict.fromkeys(r["case"] for r in rows if not r["case"].endswith(tuple(COMPILED)))
    shared = [case for case in cases if case.split()[0] in SENDS]
    counts = sorted({1, *(r["devices"] for r in rows)})
    figure = Figure(figsize=(11.0, 7.6))
    figure.subplots_adjust(0.06, 0.07, 0.76, 0.91, wspace=0.08, hspace=0.16)
    title = f"{device}: rate of each device over that of one alone with the same work"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    groups = (shared, [case for case in cases if case not in shared])
    for axes, group, least in zip(panels, groups, (0.7, 0.0), strict=True):
        for axis, mode in zip(axes, MODES, strict=True):
            for i, case in enumerate(group):
                points = {
                    r["devices"]: r["share"] for r in rows if (r["case"], r["mode"]) == (case, mode)
                }
                points = {1: 1.0, **points} if points else {}
                style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3]}
                axis.plot(list(points), list(points.values()), marker="o", ms=4, label=case,
                          **style)  # fmt: skip
            axis.set(xscale="log", ylim=(least, 1.05))
            axis.set_xticks(counts, map(str, counts))
            axis.minorticks_off()
            axis.axhline(1.0, color="gray", linestyle="--", linewidth=0.8)
            axis.grid(alpha=0.4)
        axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    for (top, bottom), name in zip(panels.T, MODES.values(), strict=True):
        top.set(title=name)
        bottom.set(xlabel="devices")
    return to_svg(figure)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(write_chart(pathlib.Path(name)))
