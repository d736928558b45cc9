"""Tune the named shapes on this device and write the tables that the kernel packages ship.

    python tools/tune_tables.py --budget 300
    python tools/tune_tables.py --ops flash_attention --cases 'llama3*' --per-call 20
    EJKERNEL_CACHE_DIR=build/tune python tools/tune_tables.py --prepare 'NVIDIA H200'
    python tools/tune_tables.py --report --page docs/tuned_h200.md

The third line, run anywhere, compiles the Triton candidates beforehand, where time on the card is
dear: carry the folder to the card and set the same variable there. The last line needs no device,
either: it shows how far the heuristic configurations are from the tuned ones.

With ``--ahead 2`` the next two calls compile while one is on the device. Compilers side by side
share one interpreter, so candidates may miss their time: ``--trials`` shows which.

Every finished call is in the file at once: stop it with Ctrl-C or by its budget and run it again,
it goes on where it was. A call that is in the table already, tuned with the versions installed
now, is left out (``--again`` tunes it again). Exit status 1: nothing could be tuned, or some call
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import checkout

checkout.use()

from ejkernel.modules.workloads import Call  # noqa: E402
from ejkernel.ops import AutotunePolicy, Autotuner, AutotuneResult, target_device  # noqa: E402
from ejkernel.ops.config.store import read_table  # noqa: E402
from ejkernel.ops.core.invocation import Invocation  # noqa: E402
from ejkernel.ops.execution import search  # noqa: E402
from ejkernel.ops.execution.timing import busy_kernel_clock, kernel_clock  # noqa: E402
from ejktest.device import described  # noqa: E402
from tuned import pipeline, report  # noqa: E402
from tuned.building import TableBuilder  # noqa: E402
from tuned.calls import TableCall, calls, hopeless, in_order  # noqa: E402
from tuned.prepare import prepare  # noqa: E402
from tuned.shipped import ShippedTable, shipped, shipped_names  # noqa: E402


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="tune_tables", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--ops", default="*", help="comma-separated globs on operations")
    p.add_argument("--cases", default="*", help="comma-separated globs on case names")
    p.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    p.add_argument("--per-call", type=float, default=60.0, help="seconds for one call")
    p.add_argument("--ahead", type=int, default=0, help="calls that compile while one is timed")
    p.add_argument("--samples", type=int, default=10, help="samples of a finalist")
    p.add_argument("--workers", type=int, help="compiler threads; default: the cores, at most 16")
    p.add_argument("--again", action="store_true", help="tune what the table has already, too")
    p.add_argument("--out", type=Path, help="the table; default: those the kernel packages ship")
    prepared = "compile the Triton candidates for a card that is not here, as 'NVIDIA H200'"
    p.add_argument("--prepare", metavar="PRODUCT", help=prepared)
    p.add_argument("--cores", type=int, default=132, help="multiprocessors of that card")
    p.add_argument("--report", action="store_true", help="show what the table holds, and stop")
    p.add_argument("--page", type=Path, help="with --report: write it to this Markdown file too")
    p.add_argument("--list", action="store_true", help="show the calls and stop")
    p.add_argument("--trials", action="store_true", help="print every candidate")
    return p.parse_args(argv)


def tiles(cfg: Any) -> str:
    """A config in few words."""
    return report.tiles(cfg.to_dict())


HEAD = f"{'ok/all':>7} {'s':>5}  {report.HEAD}"


def row(call: Call, result: AutotuneResult) -> str:
    line = report.line_of(call.operation, call.name, result)
    counts = f"{result.timed}/{len(result.trials)}"
    return f"{counts:>7} {result.seconds:5.1f}  {report.text_line(line)}"


def summary(results: list[tuple[Call, AutotuneResult]], failed: dict[str, str]) -> str:
    found = [report.line_of(call.operation, call.name, result) for call, result in results]
    lines = report.summary(found)
    worst = sorted(found, key=lambda line: -(line.ratio or 0.0))[:5]
    lines += [
        f"  worst: {line.operation} {line.case} {line.ratio:.3f}"
        for line in worst
        if line.ratio and line.ratio > report.GOOD
    ]
    times = [result.seconds for _, result in results]
    if times:
        median = statistics.median_high(times)
        lines.append(f"seconds per call: median {median:.1f}, most {max(times):.1f}")
    for clock in (kernel_clock, busy_kernel_clock):
        refused = f", then from the host: {clock.refusal}" if clock.refusal else ""
        if clock.samples or refused:
            lines.append(f"short kernels: {clock.samples} samples by CUPTI{refused}")
    lines += [f"FAILED {name}: {why}" for name, why in failed.items()]
    return "\n".join(lines)


def tune_all(
    todo: list[TableCall],
    tuner: Autotuner,
    builder: TableBuilder,
    end: float,
    args: argparse.Namespace,
) -> tuple[list[tuple[Call, AutotuneResult]], dict[str, str], int]:
    """``(results, failures, how many were not reached)``; the table is written as it grows."""
    results: list[tuple[Call, AutotuneResult]] = []
    failed: dict[str, str] = {}
    print(HEAD, flush=True)
    queue = (pipeline.Job(job.inv, lambda job=job: ((), job.call.concrete()), job) for job in todo)
    outcomes = pipeline.tune_in_turn(tuner, queue, ahead=args.ahead, end=end)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(outcomes):
        for done, outcome in outcomes:
            job = done.about
            if not isinstance(outcome, AutotuneResult):
                failed[job.name] = str(outcome).replace("\n", " | ")[:300]
                print(f"{job.name:<46} FAILED {failed[job.name]}", flush=True)
            elif not outcome.interrupted:  # a result cut short is not kept
                results.append((job.call, outcome))
                builder.add(job.inv, outcome, job.call.name)
                print(row(job.call, outcome), flush=True)
                if args.trials:
                    print(details(outcome), flush=True)
    return results, failed, len(todo) - len(results) - len(failed)


def details(result: AutotuneResult) -> str:
    """Phases and candidates, one per line."""
    lines = [", ".join(f"{k} {v:.1f} s" for k, v in result.phases.items())]
    for trial in result.trials:
        ms = f"{trial.ms:.4f}" if trial.ms is not None else (trial.error or "")[:110]
        lines.append(f"{ms:>9}  {tiles(trial.cfg)}")
    return "\n".join("      " + line for line in lines)


def show(args: argparse.Namespace) -> int:
    """Print the tables; needs no device."""
    try:
        tables = [read_table(args.out)] if args.out else [shipped(n) for n in shipped_names()]
        found = [report.of_table(*table) for table in tables]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for one in found:
        print(f"{one.device}\n{report.as_text(one)}")
    if args.page and len(found) == 1:
        text = report.as_markdown(found[0], "tools/tune_tables.py")
        args.page.write_text(text, encoding="utf-8")
    elif args.page:
        print(f"--page: {len(found)} tables, name one with --out", file=sys.stderr)
        return 1
    return 0 if found else 1


def prepare_all(args: argparse.Namespace) -> int:
    started = time.monotonic()
    todo = in_order(calls(args.ops, args.cases, "gpu"))
    print(f"{target_device().fingerprint}: {len(todo)} calls", flush=True)
    done, failed = prepare(todo, Autotuner(AutotunePolicy(True)), started + args.budget)
    print("\n".join(f"FAILED {line[:300]}" for line in failed))
    left = f", {len(todo) - done} left: run it again" if done < len(todo) else ""
    print(f"{done} calls ready, {time.monotonic() - started:.0f} s{left}")
    return 1 if failed or not done else 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report or args.page:
        return show(args)
    checkout.register()
    if args.prepare:
        with described(args.prepare, "gpu", args.cores):
            return prepare_all(args)
    target = target_device()
    kind = "cpu" if target.kind.value == "cpu" else "gpu"
    todo = in_order(calls(args.ops, args.cases, kind))
    device = target.fingerprint
    builder = TableBuilder(args.out, device) if args.out else ShippedTable(device)
    path = builder.path
    known = [job for job in todo if builder.done(job.inv.key)]
    if not args.again:
        todo = [job for job in todo if not builder.done(job.inv.key)]
    print(f"{target.fingerprint}: {len(todo)} calls to tune, {len(known)} in {path} already")
    if args.list:
        print("\n".join(job.name for job in todo))
        return 0
    search.MOST_WORKERS = args.workers or search.MOST_WORKERS
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    policy = AutotunePolicy(True, num_iters=args.samples, budget_s=args.per_call)
    by_key = {job.inv.key: job for job in todo}

    def out_of_question(inv: Invocation, cfg: Any) -> str | None:
        return hopeless(by_key[inv.key], cfg)

    tuner = Autotuner(policy, hopeless=out_of_question)
    end = started + args.budget
    results, failed, left = tune_all(todo, tuner, builder, end, args)
    print(summary(results, failed))
    print(f"{len(builder.entries)} entries in {path}, {time.monotonic() - started:.0f} s", end="")
    print(f"; {left} calls left: run it again" if left else "; all done")
    return 1 if failed or (todo and not results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
