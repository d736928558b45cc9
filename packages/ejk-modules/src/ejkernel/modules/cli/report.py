"""One self-contained HTML page: what ran, from which tier, how near to the bound, and what tuning
tried. It loads nothing from the network.

  ejk report                                   what `ejk bench` and `ejk tune` recorded here
  ejk report results/*.json --out page.html   records from elsewhere
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ejkernel.modules.cli.app import FAILED, CommandError
from ejkernel.modules.cli.output import Output, counted, write_file


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records", nargs="*", type=Path, metavar="FILE", help="records, or folders of them"
    )
    parser.add_argument("--out", type=Path, default=Path("ejk-report.html"), metavar="FILE")
    parser.add_argument("--no-doctor", action="store_true", help="leave this machine's state out")


def run(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.cli import sections
    from ejkernel.modules.cli.page import page

    records, problems = gather(args.records)
    for problem in problems:
        out.note(problem)
    if args.records and not records:
        raise CommandError("none of the files is a record", FAILED)
    benches = [r for r in records if r["kind"] == "bench"]
    tunings = [r for r in records if r["kind"] == "tune"]
    parts = [
        sections.what_ran(benches),
        sections.against_the_bound(benches),
        sections.tuning(tunings),
        sections.cached(),
    ]
    if not args.no_doctor:
        from ejkernel.modules.cli.doctor import examine

        parts.append(sections.machine(*examine(run=False)))
    shown = [p for p in parts if p]
    if not records:
        out.note("nothing was recorded yet: ejk bench and ejk tune leave records")
    devices = sorted({r.get("device", "?") for r in records}) or ["no measurements"]
    subtitle = f"{', '.join(devices)} · {datetime.date.today().isoformat()}"
    text = page("ejkernel report", subtitle, sections.tiles(benches, tunings), shown)
    write_file(args.out, text)
    out.data({"file": str(args.out), "records": [r["path"] for r in records], "bytes": len(text)})
    out.text(f"{args.out}: {counted(len(records), 'record')}, {len(text) / 1024:.0f} KiB")
    return 0


def gather(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """The records in files and folders (none = this machine's), and what could not be read."""
    from ejkernel.modules.bench import record
    from ejkernel.modules.bench.checked import sound

    given = list(paths)
    files: list[Path] = []
    for path in given or [record.folder()]:
        files += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    records, problems = [], []
    for path in files:
        try:
            found, wrong = sound(record.read(path))
            records.append(found)
            problems += [f"{path}: left out: {why}" for why in wrong]
        except (OSError, ValueError) as error:
            if given or path.exists():
                problems.append(f"{path} is left out: {error}")
    return newest(records), problems


def newest(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a later record of the same device measured again; the newest first."""
    seen: set[tuple[Any, ...]] = set()
    kept = []

    def when(record: dict[str, Any]) -> str:
        return str(record.get("time") or record.get("date") or "")

    for record in sorted(records, key=when, reverse=True):
        part, names = ("rows", ("case", "mode")) if record["kind"] == "bench" else (
            "trials", ("operation", "shape"))  # fmt: skip
        whose = (record["kind"], record.get("device"), record.get("op", ""))
        if part == "trials":
            whose = whose[:2]
        measured = {(*whose, *(row.get(n) for n in names)) for row in record[part]}
        rows = [r for r in record[part] if (*whose, *(r.get(n) for n in names)) not in seen]
        seen |= measured
        if rows:
            kept.append({**record, part: rows})
    return kept
