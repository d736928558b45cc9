"""``python -m bench OP``: time one operation, its peers and the limits of this machine."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import pkgutil
import sys

from bench import plot, report, workloads
from ejkernel.modules.bench.case import case_of
from ejkernel.modules.bench.limits import measure_limits
from ejkernel.modules.bench.runner import Row, run_cases
from ejkernel.modules.cli.bench import keep_peers
from ejkernel.modules.workloads.find import UnknownName, calls_here, operation_names


def others() -> list[str]:
    """The benchmarks that are no table of calls."""
    return sorted(m.name for m in pkgutil.iter_modules(workloads.__path__))


def names() -> list[str]:
    return sorted([*operation_names(), *others()])


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench", description=__doc__)
    p.add_argument("op", choices=names(), metavar="OP", help=", ".join(names()))
    p.add_argument("--cases", default="*", help="comma-separated globs on case names")
    p.add_argument("--peers", default="*", help="comma-separated globs on contender names")
    p.add_argument("--modes", default="fwd,fwd+bwd", help="fwd, fwd+bwd or both")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--target-s", type=float, default=0.2, help="seconds per round and contender")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-out"))
    p.add_argument("--shapes", type=int, default=2000, help="shapes: how many new ones")
    p.add_argument("--limit", type=float, help="first_call: most seconds over JAX's own, warm")
    p.add_argument("--list", action="store_true", help="show the cases and stop")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.op in others():
        return importlib.import_module(f"bench.workloads.{args.op}").main(args)
    calls = calls_here(args.op, args.cases)
    if not calls:
        known = ", ".join(c.name for c in calls_here(args.op, "*")) or "none on this device"
        print(f"no case matches {args.cases!r}; there are: {known}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(c.name for c in calls))
        return 0
    cases = [case_of(call) for call in calls]
    try:
        keep_peers(cases, args.peers)
    except UnknownName as error:
        print(error, file=sys.stderr)
        return 2
    limits = measure_limits(tuple(dict.fromkeys(c.dtype for c in cases)))
    rows: list[Row] = []
    pace = {"rounds": args.rounds, "target_s": args.target_s}
    try:
        for row in run_cases(cases, args.modes.split(","), limits, **pace):
            print(f"{row.case} {row.mode} {row.contender}: {row.ms}", file=sys.stderr)
            rows.append(row)
    except KeyboardInterrupt:
        print("stopped; writing what was measured", file=sys.stderr)
    paths = report.write(rows, limits, args.op, args.out)
    picture = plot.write(paths[0])
    print(report.markdown(rows, limits, report.environment()))
    print("wrote " + ", ".join(map(str, [*paths, picture])), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
