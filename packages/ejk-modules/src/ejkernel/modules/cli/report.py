"""Write one self-contained HTML page: measured calls, their tier and bound, and tuning candidates.
It loads nothing from the network. Needs jinja2 and matplotlib: ejk-modules[report].

  ejk report                                   records of `ejk bench` and `ejk tune` on this machine
  ejk report results/*.json --out page.html   records from elsewhere
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ejkernel.modules.cli.app import FAILED, CommandError
from ejkernel.modules.cli.output import Output, cell_text, counted, write_file

LIBRARIES = ("jinja2", "matplotlib")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records", nargs="*", type=Path, metavar="FILE", help="records, or folders of them"
    )
    parser.add_argument("--out", type=Path, default=Path("ejk-report.html"), metavar="FILE")
    parser.add_argument("--no-doctor", action="store_true", help="leave this machine's state out")


def run_command(args: argparse.Namespace, out: Output) -> int:
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        install = 'python -m pip install "ejk-modules[report]"'
        raise CommandError(f"ejk report needs {' and '.join(missing)}: {install}", FAILED)
    from ejkernel.modules.cli.sections import key_figures, machine_section, report_sections

    records, problems = gather(args.records)
    for problem in problems:
        out.note(problem)
    if args.records and not records:
        raise CommandError("none of the files is a record", FAILED)
    benches = [r for r in records if r["kind"] == "bench"]
    tunings = [r for r in records if r["kind"] == "tune"]
    sections = list(report_sections(benches, tunings))
    if not args.no_doctor:
        from ejkernel.modules.cli.doctor import examine

        sections.append(machine_section(*examine(run=False)))
    if not records:
        out.note("nothing was recorded yet: ejk bench and ejk tune leave records")
    devices = sorted({r.get("device", "?") for r in records}) or ["no measurements"]
    text = render(
        title="ejkernel report",
        subtitle=f"{', '.join(devices)} · {datetime.date.today().isoformat()}",
        numbers=key_figures(benches, tunings),
        sections=sections,
    )
    write_file(args.out, text)
    out.data({"file": str(args.out), "records": [r["path"] for r in records], "bytes": len(text)})
    out.text(f"{args.out}: {counted(len(records), 'record')}, {len(text) / 1024:.0f} KiB")
    return 0


def render(**content: Any) -> str:
    """Returns the page with this content, escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ejkernel.modules", "cli"),
        autoescape=True,
        finalize=lambda x: x if hasattr(x, "__html__") else cell_text(x),
        undefined=StrictUndefined,
    )
    return environment.get_template("report.html").render(content)


def gather(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the records in files and folders, and a line for each unreadable part.

    Without paths: the records of this machine.
    """
    from ejkernel.modules.bench import record
    from ejkernel.modules.bench.record_checks import valid_parts

    chosen = list(paths)
    files: list[Path] = []
    for path in chosen or [record.folder()]:
        files += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    records, problems = [], []
    for path in files:
        try:
            valid, wrong = valid_parts(record.read(path))
            records.append(valid)
            problems += [f"{path}: left out: {why}" for why in wrong]
        except (OSError, ValueError) as error:
            if chosen or path.exists():
                problems.append(f"{path} is left out: {error}")
    return newest(records), problems


def newest(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the newest record of every call on every device, newest first."""
    seen: set[tuple[Any, ...]] = set()
    newest_first = []

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
            newest_first.append({**record, part: rows})
    return newest_first
