"""``python -m bench OP``: time one operation, its peers and the limits of this machine."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import pathlib
import pkgutil
import sys

import jax

from bench import report, workloads
from bench.limits import measure_limits
from bench.runner import run_cases


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(workloads.__path__))


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench", description=__doc__)
    p.add_argument("op", choices=names(), metavar="OP", help=", ".join(names()))
    p.add_argument("--cases", default="*", help="glob on case names")
    p.add_argument("--peers", default="*", help="comma-separated globs on contender names")
    p.add_argument("--modes", default="fwd,fwd+bwd", help="fwd, fwd+bwd or both")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--target-s", type=float, default=0.2, help="seconds per round and contender")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench-out"))
    p.add_argument("--list", action="store_true", help="show the cases and stop")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    module = importlib.import_module(f"bench.workloads.{args.op}")
    if hasattr(module, "main"):  # workloads that are not a table of calls
        return module.main(args)
    device = jax.default_backend()
    cases = [c for c in module.cases(device) if fnmatch.fnmatch(c.name, args.cases)]
    if not cases:
        everything = ", ".join(c.name for c in module.cases(device)) or "none on this device"
        print(f"no case matches {args.cases!r}; there are: {everything}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(c.name for c in cases))
        return 0
    wanted = args.peers.split(",")
    for case in cases:
        for i, name in enumerate(list(case.contenders)):
            if i and not any(fnmatch.fnmatch(name, w) for w in wanted):
                del case.contenders[name]
    limits = measure_limits(tuple(dict.fromkeys(c.dtype for c in cases)))
    modes = args.modes.split(",")
    rows = []
    try:
        for row in run_cases(cases, modes, limits, rounds=args.rounds, target_s=args.target_s):
            rows.append(row)
    except KeyboardInterrupt:
        print("stopped; writing what was measured", file=sys.stderr)
    paths = report.write(rows, limits, args.op, args.out)
    print(report.markdown(rows, limits, report.environment()))
    print("wrote " + ", ".join(map(str, paths)), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
