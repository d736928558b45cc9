"""The gap between heuristics and tuned configs of a table, as a Markdown page."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ejkernel.modules.cli.tuning import GOOD_HEURISTIC
from ejkernel.ops.config.store import Entry

RUNNERS_UP = 3  # platforms shown besides the winner
HEAD = (
    "| case | passes | heuristic ms | tuned ms | spread | ratio | winner | best of others |",
    "|---|---|--:|--:|--:|--:|---|---|",
)
Call = tuple[str, str, Mapping[str, Entry]]  # operation, case, entries by requested platform


def report_page(header: Mapping[str, Any], entries: Mapping[str, Entry], command: str) -> str:
    """Returns what a table holds: the versions, the summary, one row per call."""
    calls = _tuned_calls(entries)
    measured = [_measured(platforms) for _, _, platforms in calls]
    versions = (header.get("provenance") or {}).get("versions") or {}
    dates = sorted({str(m["date"]) for m in measured if m.get("date")})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "no date"
    page = [
        f"# Tuned and heuristic configurations: `{header.get('device')}`",
        "",
        "What the table shipped with the kernels holds for this GPU: every named case with the "
        "fastest configuration found, and the one that arithmetic on the shapes gives without a "
        "table. Milliseconds are medians on the device of the passes named; the spread is half "
        "the distance between the quartiles. [Tuning](configs.md#tuning) says how candidates are "
        f"compared. Made by `{command}`.",
        "",
        f"Measured {when} with " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
        "",
        *(f"- {sentence}." for sentence in _summary(calls)),
    ]
    for operation in dict.fromkeys(operation for operation, *_ in calls):
        page += ["", f"## {operation}", "", *HEAD]
        for name, case, platforms in calls:
            if name == operation:
                page.append(f"| {case} | {' | '.join(_cells(platforms))} |")
    return "\n".join(page) + "\n"


def _tuned_calls(entries: Mapping[str, Entry]) -> list[Call]:
    """Returns the calls in alphabetical order; those that only force a platform are left out."""
    calls: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in entries.values():
        call, measured = entry.metadata or {}, entry.measured or {}
        name = (str(call.get("kernel")), str(measured.get("case")))
        calls.setdefault(name, {})[str(call.get("platform"))] = entry
    return [(*name, calls[name]) for name in sorted(calls) if "auto" in calls[name]]


def _measured(platforms: Mapping[str, Entry]) -> Mapping[str, Any]:
    return platforms["auto"].measured or {}


def _ratio(platforms: Mapping[str, Entry]) -> float | None:
    """Returns the time of the heuristic config over that of the winner."""
    measured = _measured(platforms)
    heuristic = measured.get("heuristic_ms")
    return None if heuristic is None else heuristic / float(measured["ms"])


def _summary(calls: Sequence[Call]) -> Iterator[str]:
    """Yields how good the heuristics are, and which platforms win."""
    ratios = [ratio for *_, platforms in calls if (ratio := _ratio(platforms)) is not None]
    if not ratios:
        yield "Nothing tuned"
        return
    good = sum(ratio <= GOOD_HEURISTIC for ratio in ratios)
    yield f"Heuristic within {GOOD_HEURISTIC - 1:.0%} of tuned: {good} of {len(ratios)}"
    median = statistics.median_high(ratios)
    times = f"median {median:.3f}, most {max(ratios):.3f}"
    yield f"Time of the heuristic config over the tuned one: {times}"
    winners = Counter(str(p["auto"].plain["config"].get("platform")) for *_, p in calls)
    yield "Winners: " + ", ".join(f"{k} {v}" for k, v in sorted(winners.items()))
    if len(calls) > len(ratios):
        yield f"Calls whose heuristic config did not run: {len(calls) - len(ratios)}"


def _cells(platforms: Mapping[str, Entry]) -> list[str]:
    measured, ratio = _measured(platforms), _ratio(platforms)
    heuristic, spread = measured.get("heuristic_ms"), measured.get("spread")
    losers = [
        (name, entry.measured["ms"])
        for name, entry in platforms.items()
        if name != "auto" and (entry.measured or {}).get("ms")
    ]
    losers.sort(key=lambda loser: loser[1])
    return [
        str(measured.get("pass", "")),
        "did not run" if heuristic is None else f"{heuristic:.4f}",
        f"{float(measured['ms']):.4f}",
        "" if spread is None else f"{spread:.1%}",
        "" if ratio is None else f"{ratio:.2f}",
        _tiles_text(platforms["auto"].plain["config"]),
        ", ".join(f"{name} {ms:.4f}" for name, ms in losers[:RUNNERS_UP]),
    ]


def _tiles_text(config: Mapping[str, Any]) -> str:
    """Returns a config in few words: platform, forward tiles, backward tiles, other fields."""
    fields = {k: v for k, v in config.items() if k not in ("platform", "backend") and v is not None}
    words = [str(config.get("platform", ""))]
    for value in fields.values():
        if isinstance(value, Mapping):
            words.append("x".join(str(v) for v in value.values() if v is not None))
    words += [f"{k}={v}" for k, v in fields.items() if not isinstance(v, Mapping)]
    return " ".join(filter(None, words))
