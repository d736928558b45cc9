"""``python -m bench OP``: what ``ejk bench OP`` measures, as JSON, Markdown and a chart.

Writes ``OP.json``, ``OP.md`` and ``OP.svg``. Options that are not listed here go to ``ejk bench``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import pkgutil
import sys
import tempfile

from bench import plot, report, workloads
from ejkernel.modules import cli
from ejkernel.modules.workloads.find import operation_names
from ejkernel.modules.workloads.shapes import SHAPES

KINDS = ("together", "alone")
"""Rows of scaling: devices that run a call together, and one of them by itself."""


def others() -> list[str]:
    """Returns the names of benchmarks that are not a table of calls."""
    return sorted(m.name for m in pkgutil.iter_modules(workloads.__path__))


def names() -> list[str]:
    return sorted([*operation_names(), *others()])


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of this command, and the options of ``ejk bench``."""
    p = argparse.ArgumentParser(prog="bench", description=__doc__)
    p.add_argument("op", choices=names(), metavar="OP", help=", ".join(names()))
    p.add_argument("--cases", default="*", help="comma-separated globs on case names")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--target-s", type=float, default=0.2, help="seconds per round and contender")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-out"))
    p.add_argument("--shapes", type=int, default=2000, help="shapes: how many new ones")
    p.add_argument("--devices", default="2,4,8", help="scaling: numbers of devices")
    p.add_argument("--kinds", default=",".join(KINDS), help="scaling: which rows")
    p.add_argument("--lock", type=pathlib.Path, help="scaling: a file, held while a row is timed")
    p.add_argument("--budget-s", type=float, help="scaling: seconds in which it ends")
    p.add_argument("--limit", type=float, help="first_call: most seconds over JAX's own, warm")
    args, ejk_options = p.parse_known_args(argv)
    if args.op in others():
        if ejk_options:
            p.error(f"{args.op} has no option {ejk_options[0]!r}")
        if not {*args.kinds.split(",")} <= {*KINDS}:
            p.error(f"--kinds: given {args.kinds!r}, expected some of {','.join(KINDS)}")
        if not all(n.isdecimal() for n in args.devices.split(",")):
            p.error(f"--devices: given {args.devices!r}, expected numbers, such as 2,4,8")
        if args.lock and not args.lock.parent.is_dir():
            p.error(f"--lock: {args.lock.parent} is not a folder")
    return args, ejk_options


def main(argv: list[str] | None = None) -> int:
    args, ejk_options = parse(argv)
    if args.op in others():
        return importlib.import_module(f"bench.workloads.{args.op}").main(args)
    order = {shape.name: i for i, shape in enumerate(SHAPES)}  # whatever was measured first
    pace = ["--rounds", str(args.rounds), "--target-s", str(args.target_s)]
    with tempfile.TemporaryDirectory() as folder:
        command = ["bench", args.op, "--shape", args.cases, *pace, "--out", folder, *ejk_options]
        status = cli.main(command)
        for record in pathlib.Path(folder).glob("*.json"):
            result = json.loads(record.read_text())
            result["rows"].sort(key=lambda row: order.get(row["case"], len(order)))
            path = report.write_json(args.out, args.op, result)
            path.with_suffix(".md").write_text(report.markdown(result))
            print(f"wrote {path}, .md and {plot.write_chart(path).name}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
