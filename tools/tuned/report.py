"""What a table says about the heuristics: how far they are from the tuned configs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ejkernel.ops.config.store import Entry
from ejkernel.ops.execution.trials import AutotuneResult

GOOD = 1.15  # a heuristic config within this of the tuned one needs no table
RUNNER_UP = 3  # of the platforms that lost, as many as this are shown


def tiles(fields: Mapping[str, Any]) -> str:
    """The fields of a config in few words: platform, forward tiles, backward tiles, the rest."""
    rest = {k: v for k, v in fields.items() if k not in ("platform", "backend") and v is not None}
    parts = [str(fields.get("platform", ""))]
    for value in rest.values():
        if isinstance(value, Mapping):
            parts.append("x".join(str(v) for v in value.values() if v is not None))
    parts += [f"{k}={v}" for k, v in rest.items() if not isinstance(v, Mapping)]
    return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Line:
    """One tuned call: the times of the winner and of the heuristic config.

    ``spread``: of the winner's samples, relative. ``passes``: "fwd" or "fwd+bwd". ``others``:
    ``(platform, milliseconds)`` of the best of every platform that lost.
    """

    operation: str
    case: str
    tuned_ms: float
    heuristic_ms: float | None
    spread: float | None
    passes: str
    winner: str
    others: tuple[tuple[str, float], ...] = ()
    date: str = ""

    @property
    def ratio(self) -> float | None:
        """Time of the heuristic config over that of the winner."""
        return None if self.heuristic_ms is None else self.heuristic_ms / self.tuned_ms


@dataclass(frozen=True)
class Report:
    """A table, read."""

    device: str
    provenance: Mapping[str, Any]
    lines: tuple[Line, ...]


def of_table(header: Mapping[str, Any], entries: Mapping[str, Entry]) -> Report:
    """The report of a table."""
    calls: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries.values():
        payload, measured = entry.metadata or {}, entry.measured or {}
        name = (str(payload.get("kernel")), str(measured.get("case")))
        calls.setdefault(name, {})[str(payload.get("platform"))] = (entry.plain["config"], measured)
    lines = [_line(name, found) for name, found in calls.items() if "auto" in found]
    return Report(
        str(header.get("device")),
        header.get("provenance") or {},
        tuple(sorted(lines, key=lambda line: (line.operation, line.case))),
    )


def _line(name: tuple[str, str], found: Mapping[str, Any]) -> Line:
    config, measured = found["auto"]
    others = [(k, v[1]["ms"]) for k, v in found.items() if k != "auto" and v[1].get("ms")]
    return Line(
        *name,
        tuned_ms=float(measured["ms"]),
        heuristic_ms=measured.get("heuristic_ms"),
        spread=measured.get("spread"),
        passes=str(measured.get("pass", "")),
        winner=tiles(config),
        others=tuple(sorted(others, key=lambda other: other[1])[:RUNNER_UP]),
        date=str(measured.get("date", "")),
    )


def line_of(operation: str, case: str, result: AutotuneResult) -> Line:
    """What tuning has just found for a call."""
    return _line((operation, case), {"auto": (result.best.to_dict(), result.measured())})


def summary(lines: Sequence[Line]) -> list[str]:
    """How good the heuristics are, and who wins."""
    ratios = [line.ratio for line in lines if line.ratio is not None]
    if not ratios:
        return ["nothing tuned"]
    good = sum(ratio <= GOOD for ratio in ratios)
    told = [
        f"heuristic within {GOOD - 1:.0%} of tuned: {good} of {len(ratios)}",
        "time of the heuristic config over the tuned one: median "
        f"{statistics.median_high(ratios):.3f}, most {max(ratios):.3f}",
    ]
    winners = Counter(line.winner.partition(" ")[0] for line in lines)
    told.append("winners: " + ", ".join(f"{k} {v}" for k, v in sorted(winners.items())))
    without = len(lines) - len(ratios)
    if without:
        told.append(f"calls whose heuristic config did not run: {without}")
    return told


HEAD = f"{'call':<46} {'heuristic':>9} {'tuned ms':>9} {'ratio':>6}  winner"


def as_text(report: Report) -> str:
    """One line per call for a terminal."""
    return "\n".join([HEAD, *map(text_line, report.lines), *summary(report.lines)])


def text_line(line: Line) -> str:
    """A call under ``HEAD``."""
    heuristic = "failed" if line.heuristic_ms is None else f"{line.heuristic_ms:.4f}"
    ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
    name = f"{line.operation} {line.case}"
    return f"{name:<46} {heuristic:>9} {line.tuned_ms:9.4f} {ratio:>6}  {line.winner}"


def as_markdown(report: Report, command: str) -> str:
    """A page: what was measured and how, the summary, one row per call."""
    versions = report.provenance.get("versions") or {}
    dates = sorted({line.date for line in report.lines if line.date})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "no date"
    page = [
        f"# Tuned and heuristic configurations: `{report.device}`",
        "",
        "What the table shipped with the kernels holds for this card: every named case with the "
        "fastest configuration found, and the one that arithmetic on the shapes gives without a "
        "table. Milliseconds are medians on the device of the passes named; the spread is half "
        "the distance between the quartiles. [Tuning](configs.md#tuning) says how candidates are "
        f"compared. Made by `{command}`.",
        "",
        f"Measured {when} with " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
        "",
        *(f"- {line[0].upper()}{line[1:]}." for line in summary(report.lines)),
    ]
    for operation in dict.fromkeys(line.operation for line in report.lines):
        page += ["", f"## {operation}", "", *_rows(report.lines, operation)]
    return "\n".join(page) + "\n"


def _rows(lines: Iterable[Line], operation: str) -> list[str]:
    rows = [
        "| case | passes | heuristic ms | tuned ms | spread | ratio | winner | best of others |",
        "|---|---|--:|--:|--:|--:|---|---|",
    ]
    for line in lines:
        if line.operation != operation:
            continue
        heuristic = "did not run" if line.heuristic_ms is None else f"{line.heuristic_ms:.4f}"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        spread = "" if line.spread is None else f"{line.spread:.1%}"
        others = ", ".join(f"{platform} {ms:.4f}" for platform, ms in line.others)
        rows.append(
            f"| {line.case} | {line.passes} | {heuristic} | {line.tuned_ms:.4f} | {spread} "
            f"| {ratio} | {line.winner} | {others} |"
        )
    return rows
