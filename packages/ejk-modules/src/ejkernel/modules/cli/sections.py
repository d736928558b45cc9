"""The parts of the report, each from records to HTML; an empty string when there is nothing."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ejkernel.modules.bench.record import config_text, rates_text
from ejkernel.modules.cli import page, svg
from ejkernel.modules.cli.output import counted
from ejkernel.ops.execution.progress import first_line

Record = dict[str, Any]

_PALETTE = ("var(--s1)", "var(--s2)", "var(--s3)", "var(--s4)", "var(--s5)", "var(--other)")
_STATUS = {"ok": "✔", "warn": "!", "fail": "✘", "info": "·"}


def _rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        {"op": r.get("op", ""), "device": r.get("device", ""), **row}
        for r in records
        for row in r["rows"]
    ]


def _ours(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in rows if r["contender"] == "ejkernel" and r.get("ms") is not None]


def _mean(values: Sequence[float]) -> float | None:
    """Geometric, of positive numbers."""
    positive = [v for v in values if v and v > 0]
    return statistics.geometric_mean(positive) if positive else None


def tiles(benches: Sequence[Record], tunings: Sequence[Record]) -> dict[str, str]:
    """The numbers at the top of the page."""
    found: dict[str, str] = {}
    ours = _ours(_rows(benches))
    if ours:
        found["calls measured"] = str(len({(r["op"], r["case"], r["mode"]) for r in ours}))
        percent = _mean([r["percent_of_limit"] for r in ours if r.get("percent_of_limit")])
        if percent is not None:
            found["of the bound, geometric mean"] = f"{percent:.0f}%"
        # "ejkernel-triton" and the like are our own
        others = [
            min(v for k, v in r["speed_over"].items() if not k.startswith("ejkernel"))
            for r in ours
            if any(not k.startswith("ejkernel") for k in r.get("speed_over", {}))
        ]
        ratio = _mean(others)
        if ratio is not None:
            found["of the best peer's speed, geometric mean"] = f"{ratio:.2f}x"
    tuned = [t for r in tunings for t in r["trials"]]
    if tuned:
        found["calls tuned"] = str(len(tuned))
        gains = [t["heuristic_over_best"] for t in tuned if t.get("heuristic_over_best")]
        if gains:
            within = sum(g <= 1.15 for g in gains)
            found["heuristics within 15% of tuned"] = f"{within}/{len(gains)}"
    return found


def what_ran(benches: Sequence[Record]) -> str:
    """Implementation, configuration and tier of every measured call."""
    ours = _ours(_rows(benches))
    if not ours:
        return ""
    rows = [
        (
            r["op"], r["case"], r["mode"], r["ms"], r.get("tflops"), r.get("gbps"),
            None if r.get("percent_of_limit") is None else f"{r['percent_of_limit']:.0f}%",
            page.tag(r["tier"]) if r.get("tier") else "", r.get("implementation", ""),
            r.get("config", ""),
        )
        for r in ours
    ]  # fmt: skip
    columns = ("operation", "case", "mode", "ms", "TFLOP/s", "GB/s", "of bound", "tier",
               "implementation", "config")  # fmt: skip
    whole = page.table(columns, rows, numbers=(3, 4, 5, 6), code=(8, 9))
    if len(rows) > 16:
        whole = page.details(f"all {len(rows)} measured calls", whole)
    why = (
        "Each measured call with what automatic choice took, and the tier of the configuration: "
        "the user's files and shipped tables (persistent), tuning, or arithmetic (heuristics)."
    )
    return page.section("ran", "What ran", why, _tiers(ours), whole)


def _tiers(ours: Sequence[dict[str, Any]]) -> str:
    counts = Counter((r.get("implementation", ""), r["tier"]) for r in ours if r.get("tier"))
    if not counts:
        return ""
    rows = [(name, page.tag(tier), n) for (name, tier), n in sorted(counts.items())]
    return page.table(("implementation", "tier", "calls"), rows, numbers=(2,), code=(0,))


def against_the_bound(benches: Sequence[Record]) -> str:
    """Dot plots: each contender's share of what the machine can do."""
    from ejkernel.modules.bench.limits import ABOVE

    parts = []
    for record in benches:
        timed = [r for r in record["rows"] if r.get("ms") is not None]
        rows = [r for r in timed if r.get("percent_of_limit") is not None]
        if rows:
            parts.append(_bound_plot(record, rows))
    if not parts:
        return ""
    why = (
        "The bound is the slower of arithmetic and memory, at the rates of a large matrix product "
        f"and a large copy measured in the same run. {ABOVE}"
    )
    return page.section("bound", "Against the bound and beside peers", why, *parts)


def bound_dots(rows: Sequence[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """The dots of measured rows as SVG, and the colours of their contenders."""
    series = list(dict.fromkeys(r["contender"] for r in rows))
    colours = {"ejkernel": "var(--accent)"}
    others = [s for s in series if s != "ejkernel"]
    colours |= {s: _PALETTE[min(i, len(_PALETTE) - 1)] for i, s in enumerate(others)}
    colours = {s: colours[s] for s in series}
    modes = list(dict.fromkeys(r["mode"] for r in rows)) or ["fwd"]
    high = max([100.0, *(min(r["percent_of_limit"], 150.0) for r in rows)])
    ticks = tuple(float(t) for t in range(0, int(high) + 1, 25))
    titles = {"fwd": "forward", "fwd+bwd": "forward + backward"}
    panels = [
        svg.Panel(titles.get(m, m), max(high, ticks[-1]), ticks, reference=100.0) for m in modes
    ]
    lines = []
    for case in dict.fromkeys(r["case"] for r in rows):
        lanes = []
        for mode in modes:
            here = [r for r in rows if r["case"] == case and r["mode"] == mode]
            ours = next((_time(r["ms"]) for r in _ours(here)), "")
            lanes.append(svg.Lane(tuple(map(_dot, here)), ours))
        lines.append((case, lanes))
    return svg.dots(panels, lines, colours), colours


def _bound_plot(record: Record, rows: Sequence[dict[str, Any]]) -> str:
    dots, colours = bound_dots(rows)
    head = f"{record.get('op', '')} on {record.get('device', '?')}, {record.get('date', '')}"
    missing = [r for r in record["rows"] if r.get("ms") is None]
    left_out = ""
    if missing:
        left_out = page.details(
            f"{counted(len(missing), 'contender')} did not run",
            page.table(
                ("case", "mode", "what", "why"),
                [(r["case"], r["mode"], r["contender"], r.get("note", "")) for r in missing],
            ),
        )
    return (
        f"<h3>{page.escape(head)}</h3>"
        f'<p class="why">{page.escape(rates_text(record.get("limits", {})))}</p>'
        + page.legend(colours)
        + page.wide(dots)
        + left_out
    )


def _time(ms: float) -> str:
    """Few letters: they stand at the end of a row."""
    return f"{ms:.4g} ms" if ms >= 0.1 else f"{1e3 * ms:.4g} µs"


def _dot(r: dict[str, Any]) -> svg.Dot:
    over = "".join(f", {v:.2f}x {k}" for k, v in r.get("speed_over", {}).items())
    hint = f"{r['contender']}: {r['percent_of_limit']:.0f}% of the bound, {r['ms']:.4g} ms{over}"
    return svg.Dot(r["percent_of_limit"], r["contender"], hint)


# ---- tuning ------------------------------------------------------------------------------------


def tuning(records: Sequence[Record]) -> str:
    """All candidates of all tuned calls, and the tiles of each."""
    calls = [t for r in records for t in r["trials"] if t.get("best_ms")]
    if not calls:
        return ""
    colours = {"winner": "var(--accent)", "heuristic": "var(--s1)", "candidate": "var(--other)"}
    lines = [(f"{t['operation']} {t['shape']}", [_landscape(t)]) for t in calls]
    ticks = (1.0, 1.15, 1.5, 2.0, 2.5, 3.0)
    panel = svg.Panel("time over the winner's", 3.0, ticks, "x", low=0.95, reference=1.15)
    rows = [
        (
            t["operation"], t["shape"], t["pass"], t["heuristic_ms"], t["best_ms"],
            None if not t.get("heuristic_over_best") else f"{t['heuristic_over_best']:.2f}x",
            t["seconds"], f"{t['timed']}/{t['candidates']}", config_text(t["config"]),
        )
        for t in calls
    ]  # fmt: skip
    columns = ("operation", "case", "pass", "heuristic ms", "tuned ms", "gain", "s", "timed",
               "config")  # fmt: skip
    why = (
        "Each dot is a candidate: its time over that of the winner. The heuristic configuration "
        "is what a first call gets where nothing was tuned; left of the dashed line it is within "
        "15%. Candidates slower than three times the winner sit at the edge."
    )
    return page.section(
        "tuning", "Tuning landscape", why, page.legend(colours),
        page.wide(svg.dots([panel], lines, colours)),
        page.table(columns, rows, numbers=(3, 4, 5, 6, 7), code=(8,)),
        *(_one_call(t) for t in calls),
    )  # fmt: skip


def _landscape(t: Mapping[str, Any]) -> svg.Lane:
    marks = []
    for i, trial in enumerate(t["trials"]):
        if trial["ms"] is None:
            continue
        hint = f"{trial['ms']:.4g} ms  {config_text(trial['config'])}"
        x = trial["ms"] / t["best_ms"]
        marks.append(svg.Dot(x, "candidate", hint))
        if i == 0:
            marks.append(svg.Dot(x, "heuristic", f"heuristic: {hint}", hollow=True))
    marks.append(
        svg.Dot(1.0, "winner", f"winner: {t['best_ms']:.4g} ms  {config_text(t['config'])}")
    )
    return svg.Lane(tuple(marks), f"{t['best_ms']:.4g} ms")


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in (config or {}).items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name.removesuffix('_params')}.")
        else:
            flat[prefix + name] = value
    return flat


def _one_call(t: Mapping[str, Any]) -> str:
    """The trials of one call as a table, and its two most varied fields as a heat map."""
    trials = sorted(t["trials"], key=lambda x: (x["ms"] is None, x["ms"] or 0.0))
    rows = [
        (
            config_text(x["config"]), x["ms"], x["fwd_ms"], x["bwd_ms"],
            first_line(x["error"])[:140],
        )
        for x in trials
    ]  # fmt: skip
    listing = page.table(
        ("config", "ms", "fwd", "bwd", "skipped because"), rows, numbers=(1, 2, 3), code=(0,)
    )
    return page.details(f"{t['operation']} {t['shape']}: every candidate", _map_of(t), listing)


def _map_of(t: Mapping[str, Any]) -> str:
    timed = [(_flat(x["config"]), x["ms"]) for x in t["trials"] if x["ms"] is not None]
    values: dict[str, set[Any]] = {}
    for flat, _ in timed:
        for name, value in flat.items():
            if type(value) is int:
                values.setdefault(name, set()).add(value)
    varied = sorted((n for n in values if len(values[n]) > 1), key=lambda n: -len(values[n]))
    tiles_first = [n for n in varied if "block" in n or "tile" in n] + varied
    names = list(dict.fromkeys(tiles_first))[:2]
    if len(names) < 2:
        return ""
    a, b = names
    cells: dict[tuple[Any, Any], float] = {}
    for flat, ms in timed:
        if type(flat.get(a)) is int and type(flat.get(b)) is int:
            place = flat[a], flat[b]
            cells[place] = min(ms, cells.get(place, math.inf))
    if len(cells) < 3:
        return ""
    best = min(cells, key=lambda place: cells[place])
    across, down = (sorted({place[i] for place in cells}) for i in (0, 1))
    return page.wide(svg.heat(across, down, cells, (a, b), best))


# ---- what is there -----------------------------------------------------------------------------


def cached() -> str:
    """The configurations on disk."""
    from ejkernel.modules.cli import stored

    files = stored.scan()
    found = stored.configs(files)
    if not files:
        return ""
    rows = [(*c.said, c.measured.get("ms"), c.measured.get("date")) for c in found]
    columns = ("kernel", "device", "arrays", "config", "ms", "tuned on")
    body = page.table(columns, rows, numbers=(4,), code=(2, 3))
    if len(rows) > 16:
        body = page.details(f"all {len(rows)}", body)
    others = [
        f'<p class="warn">{page.escape(f"{f.path}: {f.problem}")}</p>'
        for f in files
        if f.status != "ok"
    ]
    why = f"{counted(len(found), 'configuration')} in {stored.root()}: what later calls get."
    return page.section("cache", "Tuned configurations here", why, body, *others)


def machine(checks: Sequence[Any], device: Mapping[str, Any], table: Sequence[Any]) -> str:
    """What `ejk doctor` says."""
    rows = []
    for c in checks:
        mark = page.Markup(f'<span class="{c.status}">{_STATUS[c.status]}</span>')
        found = page.escape(c.found)
        if c.fix and c.status in ("warn", "fail"):
            found += f"<br><code>{page.escape(c.fix)}</code>"
        rows.append((mark, c.what, page.Markup(found)))
    parts = [page.table(("", "what", "found"), rows)]
    if table:
        platforms = list(table[0]["platforms"])
        grid = [(row["operation"], *(_answer(row, p) for p in platforms)) for row in table]
        parts.append("<h3>Operations by platform, for a typical call</h3>")
        parts.append(page.table(("operation", *platforms), grid))
    why = f"What ejk doctor found on {device.get('name', 'this machine')}, where this was written."
    return page.section("machine", "This machine", why, *parts)


def _answer(row: Mapping[str, Any], platform: str) -> page.Markup:
    answer = row["platforms"][platform]
    if answer != "yes":
        return page.Markup(f'<span class="info" title="{page.escape(answer)}">-</span>')
    chosen = row["chosen"] == platform
    return page.Markup('<span class="ok">● chosen</span>' if chosen else "○ can")
