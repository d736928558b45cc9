"""Time an operation, every platform and every peer that can do the same call, against the bound
that a large matrix product and a large copy set in the same run.

  ejk bench flash_attention --shape llama3-8b-4k
  ejk bench flash_attention b=1 s=2k h=8 d=64 dtype=float32 --modes fwd
  ejk bench page_attention --shapes --peers 'jax*'
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ejkernel.modules.cli.app import FAILED, INTERRUPTED, CommandError, at_least_one, seconds
from ejkernel.modules.cli.calls import add_arguments, calls_of, note_devices
from ejkernel.modules.cli.output import Output


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--peers", default="*", help="comma-separated globs on peers")
    parser.add_argument("--modes", default="fwd,fwd+bwd", help="fwd, fwd+bwd or both")
    parser.add_argument("--rounds", type=at_least_one, default=5, metavar="N")
    parser.add_argument("--target-s", type=seconds, default=0.1, metavar="S", help="s per round")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the record goes")


def run_command(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules.bench import record
    from ejkernel.modules.bench.case import case_of
    from ejkernel.modules.bench.limits import measure_limits
    from ejkernel.modules.bench.runner import MODES, run_cases, select_runs

    modes = args.modes.split(",")
    if not set(modes) <= set(MODES):
        raise CommandError(f"--modes {args.modes}: expected {' and '.join(MODES)}")
    calls = calls_of(args.operation, args.shape, args.words)
    note_devices(out, calls)
    cases = [case_of(call) for call in calls]
    keep_peers(cases, args.peers)
    pace = {"rounds": args.rounds, "target_s": args.target_s}
    rows: list[Any] = []
    status = 0
    count = sum(len(case.contenders) for case, _ in select_runs(cases, modes))
    with out.progress(f"bench {args.operation}", count + 1) as advance:
        limits = measure_limits(tuple(dict.fromkeys(c.dtype for c in cases)), **pace)
        advance("limits of this machine")
        try:
            for row in run_cases(cases, modes, limits, **pace):
                took = "not run" if row.ms is None else f"{row.ms:.4g} ms"
                advance(f"{row.case} {row.mode} {row.contender} {took}")
                rows.append(row)
        except KeyboardInterrupt:
            status = INTERRUPTED
    if status:
        out.note("interrupted: what was measured follows")
    content = {
        "op": calls[0].operation,
        "limits": asdict(limits),
        "rows": [asdict(r) for r in rows],
    }
    out.data({**record.environment(), **content})
    _show(rows, limits, out)
    try:
        path = record.write("bench", calls[0].operation, content, args.out)
        out.note(f"recorded in {path}; ejk report shows it")
    except OSError as error:
        out.note(f"not recorded: {error}")
    failed = rows and all(r.ms is None for r in rows if r.contender == "ejkernel")
    return status or (FAILED if failed else 0)


def keep_peers(cases: list[Any], patterns: str) -> None:
    """Drops the contenders that no glob matches; ours, the first, stays and may be named alone.

    Raises:
        UnknownName: a glob that matches none of any case.
    """
    from ejkernel.modules.workloads.find import UnknownName, matching

    names = [name for case in cases for name in case.contenders]
    for pattern in filter(None, patterns.split(",")):
        if pattern != "*" and not matching(names, pattern):
            raise UnknownName("peer", pattern, names)
    for case in cases:
        _, *others = case.contenders
        for name in set(others) - set(matching(others, patterns)):
            del case.contenders[name]


def _show(rows: list[Any], limits: Any, out: Output) -> None:
    from ejkernel.modules.bench.record import rates_text

    out.text(f"limits measured now: {rates_text(asdict(limits))}")
    timed, notes = [], []
    for r in rows:
        if r.ms is None:
            notes.append((f"{r.case} {r.mode} {r.contender}", r.note))
            continue
        over = ", ".join(f"{k} {v:.2f}x" for k, v in r.speed_over.items())
        percent = None if r.percent_of_limit is None else f"{r.percent_of_limit:.0f}% {r.bound}"
        timed.append((
            r.case, r.mode, r.contender, r.ms, r.spread_ms, r.tflops, r.gbps, percent, over,
        ))  # fmt: skip
    if timed:
        out.table(
            ("case", "mode", "what", "ms", "+-", "TFLOP/s", "GB/s", "of the bound", "speed over"),
            timed,
            right=(3, 4, 5, 6, 7),
            optional=(4, 6, 5, 8, 7),
            headings=2,
        )
    if any((r.percent_of_limit or 0.0) > 100.0 for r in rows):
        from ejkernel.modules.bench.limits import ABOVE

        out.text(ABOVE)
    if any(r.clock == "device" for r in rows):
        out.text("short kernels: the device's own times after a rest, without launches")
    ours = [r for r in rows if r.contender == "ejkernel" and r.ms is not None and r.tier]
    chosen = {(r.case, r.implementation, r.config, r.tier) for r in ours}
    if chosen:
        out.title("what ran")
        out.table(("case", "implementation", "config", "tier"), sorted(chosen))
    if notes:
        out.title("not run")
        out.fields(notes)
