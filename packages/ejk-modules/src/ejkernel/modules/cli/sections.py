"""Sections of the report: tables and charts of records, of the cache and of this machine."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ejkernel.modules.bench.record import config_text, rates_text
from ejkernel.modules.cli import charts
from ejkernel.modules.cli.output import MARKS, counted
from ejkernel.modules.cli.tuning import GOOD_HEURISTIC
from ejkernel.ops.execution.progress import first_line

Record = dict[str, Any]
MAX_ROWS = 16  # more are folded


@dataclass(frozen=True)
class Table:
    """Rows under column names; ``title`` is the heading, or the summary of a folded table."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    is_folded: bool = False


@dataclass(frozen=True)
class Chart:
    """An SVG under a title."""

    title: str
    svg: str


@dataclass(frozen=True)
class Section:
    """Tables and charts under a heading, with a sentence about them."""

    name: str
    heading: str
    summary: str
    parts: Sequence[Table | Chart]


def report_sections(benches: Sequence[Record], tunings: Sequence[Record]) -> Iterator[Section]:
    """Yields the sections on records and on the cache; those without content are left out."""
    rows = list(_ejkernel_rows(benches))
    if rows:
        yield _measured_calls(rows)
    parts = [part for record in benches for part in _bound_parts(record)]
    if parts:
        yield _against_the_bound(parts)
    calls = [t for r in tunings for t in r["trials"] if t.get("best_ms")]
    if calls:
        yield _tuned_calls(calls)
    yield from _cached_configs()


def key_figures(benches: Sequence[Record], tunings: Sequence[Record]) -> dict[str, str]:
    """Returns the figures at the top of the page by name."""
    figures: dict[str, str] = {}
    rows = list(_ejkernel_rows(benches))
    if rows:
        figures["calls measured"] = str(len({(r["op"], r["case"], r["mode"]) for r in rows}))
        percent = _geometric_mean(r.get("percent_of_limit") for r in rows)
        if percent is not None:
            figures["of the bound, geometric mean"] = f"{percent:.0f}%"
        # "ejkernel-triton" and the like are no peers
        peers = [
            [v for k, v in r.get("speed_over", {}).items() if not k.startswith("ejkernel")]
            for r in rows
        ]
        ratio = _geometric_mean(min(speeds) for speeds in peers if speeds)
        if ratio is not None:
            figures["of the best peer's speed, geometric mean"] = f"{ratio:.2f}x"
    calls = [t for r in tunings for t in r["trials"]]
    if calls:
        figures["calls tuned"] = str(len(calls))
        gains = [t["heuristic_over_best"] for t in calls if t.get("heuristic_over_best")]
        if gains:
            good = sum(g <= GOOD_HEURISTIC for g in gains)
            figures["heuristics within 15% of tuned"] = f"{good}/{len(gains)}"
    return figures


def _ejkernel_rows(benches: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yields the timed rows of automatic choice, each with its operation."""
    for record in benches:
        for row in record["rows"]:
            if row["contender"] == "ejkernel" and row.get("ms") is not None:
                yield {"op": record.get("op", ""), **row}


def _geometric_mean(values: Iterable[float | None]) -> float | None:
    positive = [v for v in values if v is not None and v > 0]
    return statistics.geometric_mean(positive) if positive else None


def _measured_calls(rows: Sequence[dict[str, Any]]) -> Section:
    counts = Counter((r.get("implementation", ""), r["tier"]) for r in rows if r.get("tier"))
    by_tier = [(*names, count) for names, count in sorted(counts.items())]
    columns = ("op", "case", "mode", "ms", "tflops", "gbps", "percent_of_limit", "tier",
               "implementation", "config")  # fmt: skip
    calls = Table(
        ("operation", "case", "mode", "ms", "TFLOP/s", "GB/s", "% of bound", *columns[7:]),
        [[r.get(name) for name in columns] for r in rows],
        f"all {counted(len(rows), 'measured call')}",
        len(rows) > MAX_ROWS,
    )
    return Section(
        "ran",
        "What ran",
        "Each measured call with what automatic choice took, and the tier of the configuration: "
        "the user's files and shipped tables (persistent), tuning, or arithmetic (heuristics).",
        [Table(("implementation", "tier", "calls"), by_tier), calls],
    )


def _bound_parts(record: Record) -> Iterator[Table | Chart]:
    """Yields a chart of the record's times, and a table of the contenders that did not run."""
    timed = [r for r in record["rows"] if r.get("ms") is not None]
    if not any(r.get("percent_of_limit") is not None for r in timed):
        return
    title = f"{record.get('op', '')} on {record.get('device', '?')}, {record.get('date', '')}"
    rates = rates_text(record.get("limits", {}))
    yield Chart(f"{title}; {rates}" if rates else title, charts.bound_chart(timed))
    failed = [r for r in record["rows"] if r.get("ms") is None]
    if failed:
        rows = [(r["case"], r["mode"], r["contender"], r.get("note", "")) for r in failed]
        title = f"{counted(len(failed), 'contender')} did not run"
        yield Table(("case", "mode", "contender", "reason"), rows, title, is_folded=True)


def _against_the_bound(parts: Sequence[Table | Chart]) -> Section:
    from ejkernel.modules.bench.limits import ABOVE

    return Section(
        "bound",
        "Against the bound and its peers",
        "The bound is the slower of arithmetic and memory, at the rates of a large matmul "
        f"and a large copy measured in the same run. {ABOVE}",
        parts,
    )


def _tuned_calls(calls: Sequence[Mapping[str, Any]]) -> Section:
    rows = [
        (
            t["operation"], t["shape"], t["pass"], t["heuristic_ms"], t["best_ms"],
            f"{t['heuristic_over_best']:.2f}x" if t.get("heuristic_over_best") else "",
            t["seconds"], f"{t['timed']}/{t['candidates']}", config_text(t["config"]),
        )
        for t in calls
    ]  # fmt: skip
    columns = ("operation", "case", "pass", "heuristic ms", "tuned ms", "gain", "s", "timed",
               "config")  # fmt: skip
    return Section(
        "tuning",
        "Tuning landscape",
        "Each dot is a candidate: its time over that of the winner. The heuristic configuration "
        "is what a first call gets where nothing was tuned; left of the dashed line it is within "
        "15%. Candidates slower than three times the winner are at the edge.",
        [Chart("", charts.candidates_chart(calls)), Table(columns, rows), *map(_candidates, calls)],
    )


def _candidates(call: Mapping[str, Any]) -> Table:
    trials = sorted(call["trials"], key=lambda t: (t["ms"] is None, t["ms"] or 0.0))
    rows = [
        (config_text(t["config"]), t["ms"], t["fwd_ms"], t["bwd_ms"], first_line(t["error"])[:140])
        for t in trials
    ]
    title = f"{call['operation']} {call['shape']}: every candidate"
    return Table(("config", "ms", "fwd", "bwd", "skipped because"), rows, title, is_folded=True)


def _cached_configs() -> Iterator[Section]:
    from ejkernel.modules.cli import stored

    files = stored.scan()
    if not files:
        return
    configs = stored.configs(files)
    rows = [(*c.cells, c.measured.get("ms"), c.measured.get("date")) for c in configs]
    title = f"all {counted(len(rows), 'configuration')}"
    columns = ("kernel", "device", "arrays", "config", "ms", "tuned on")
    parts = [Table(columns, rows, title, len(rows) > MAX_ROWS)] if rows else []
    unreadable = [(f.path, f.problem) for f in files if f.status != "ok"]
    if unreadable:
        parts.append(Table(("file", "problem"), unreadable))
    yield Section(
        "cache",
        "Tuned configurations here",
        f"{counted(len(rows), 'configuration')} in {stored.root()}: what later calls get.",
        parts,
    )


def machine_section(
    checks: Sequence[Any], device: Mapping[str, Any], operations: Sequence[Any]
) -> Section:
    """Returns the section with the checks of ``doctor.examine``."""
    rows = [
        (MARKS[c.status], c.what, c.found, c.fix if c.status in ("warn", "fail") else "")
        for c in checks
    ]
    parts = [Table(("", "check", "result", "fix"), rows)]
    if operations:
        platforms = list(operations[0]["platforms"])
        answers = [(row["operation"], *_answers(row)) for row in operations]
        title = "Operations by platform, for a typical call"
        parts.append(Table(("operation", *platforms), answers, title))
    summary = f"What ejk doctor says of {device.get('name', 'this machine')}."
    return Section("machine", "This machine", summary, parts)


def _answers(row: Mapping[str, Any]) -> Iterator[str]:
    for platform, answer in row["platforms"].items():
        yield "chosen" if row["chosen"] == platform else "yes" if answer == "yes" else "-"
