"""Tune the named shapes on this device and write the tables that the kernel packages ship.

    python tools/tune_tables.py --budget 300
    python tools/tune_tables.py --ops flash_attention --cases 'llama3*' --per-call 20
    EJKERNEL_CACHE_DIR=build/tune python tools/tune_tables.py --prepare 'NVIDIA H200'
    python tools/tune_tables.py --report --page docs/tuned_h200.md

Tunes as ``ejk tune`` does, on the arrays of the named shapes. Every finished call is in the file at
once: stop with Ctrl-C or by the budget and run it again, it goes on where it was. A call that is in
the table already, tuned with the versions installed now, is left out (``--force`` tunes it again).
Exit status 1: nothing could be tuned, or some call failed.

The third line, run anywhere, compiles the Triton candidates beforehand, where time on the GPU is
scarce: copy the folder to the GPU's machine and set the same variable there. The last line needs no
device, either: it shows how far the heuristic configurations are from the tuned ones.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

import checkout

checkout.use()

from ejkernel.modules.cli import tuning  # noqa: E402
from ejkernel.modules.cli.app import make_output  # noqa: E402
from ejkernel.ops import AutotunePolicy, Autotuner, AutotuneResult, target_device  # noqa: E402
from ejkernel.ops.config.store import read_table  # noqa: E402
from ejktest.device import described  # noqa: E402
from tuned import calls  # noqa: E402
from tuned.prepare import compile_candidates  # noqa: E402
from tuned.report import report_page  # noqa: E402
from tuned.tables import ShippedTable, TableBuilder, read_shipped, shipped_names  # noqa: E402


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="tune_tables", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--ops", default="*", help="comma-separated globs on operations")
    p.add_argument("--cases", default="*", help="comma-separated globs on case names")
    p.add_argument("--budget", type=float, default=600.0, help="seconds for everything")
    p.add_argument("--per-call", type=float, default=60.0, help="seconds for one call")
    p.add_argument("--samples", type=int, default=10, help="samples of a finalist")
    p.add_argument("--force", action="store_true", help="tune what the table has already, too")
    p.add_argument("--out", type=Path, help="the table; default: those the kernel packages ship")
    prepared = "compile the Triton candidates for a GPU that is not here, as 'NVIDIA H200'"
    p.add_argument("--prepare", metavar="PRODUCT", help=prepared)
    p.add_argument("--cores", type=int, default=132, help="multiprocessors of that GPU")
    p.add_argument("--report", action="store_true", help="show what the table holds, and stop")
    p.add_argument("--page", type=Path, help="with --report: write it to this Markdown file too")
    p.add_argument("--list", action="store_true", help="show the calls and stop")
    return p.parse_args(argv)


class TableSession(tuning.Session):
    """Tunes on the arrays of named shapes and adds winners to a table."""

    def __init__(self, builder: TableBuilder, policy: AutotunePolicy, total_s: float):
        super().__init__(make_output(), total_s)
        self.builder = builder
        self.tuner = Autotuner(policy)

    def search(self, task: tuning.Task, on_trial: Any, remaining_s: Any) -> AutotuneResult | None:
        assert task.call is not None
        arrays = task.call.concrete
        self.tuner.on_trial = on_trial
        self.tuner.prune = lambda inv, cfg: calls.pruned_reason(task, cfg)
        result = self.tuner.tune(task.inv, inputs=lambda: ((), arrays()))
        if result.interrupted:  # a search cut short is not kept
            return None
        self.builder.add(task.inv, result, task.case)
        return result


def show_tables(args: argparse.Namespace) -> int:
    """Prints the tables; needs no device."""
    try:
        tables = [read_table(args.out)] if args.out else map(read_shipped, shipped_names())
        pages = [report_page(*table, "tools/tune_tables.py") for table in tables]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(pages))
    if args.page and len(pages) != 1:
        print(f"--page: {len(pages)} tables, name one with --out", file=sys.stderr)
        return 1
    if args.page:
        args.page.write_text(pages[0], encoding="utf-8")
    return 0 if pages else 1


def prepare_all(args: argparse.Namespace) -> int:
    started = time.monotonic()
    tasks = calls.in_order(calls.named_tasks(args.ops, args.cases, "gpu"))
    print(f"{target_device().fingerprint}: {len(tasks)} calls", flush=True)
    done, failed = compile_candidates(tasks, started + args.budget)
    print("\n".join(f"FAILED {line[:300]}" for line in failed))
    left = f", {len(tasks) - done} left: run it again" if done < len(tasks) else ""
    print(f"{done} calls ready, {time.monotonic() - started:.0f} s{left}")
    return 1 if failed or not done else 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.report or args.page:
        return show_tables(args)
    checkout.register()
    if args.prepare:
        with described(args.prepare, "gpu", args.cores):
            return prepare_all(args)
    target = target_device()
    tasks = calls.in_order(
        calls.named_tasks(args.ops, args.cases, "cpu" if target.kind.value == "cpu" else "gpu")
    )
    device = target.fingerprint
    builder = TableBuilder(args.out, device) if args.out else ShippedTable(device)
    pending = tasks if args.force else [t for t in tasks if not builder.is_tuned(t.inv.key)]
    print(f"{device}: {len(pending)} of {len(tasks)} calls to tune for {builder.path}", flush=True)
    if args.list:
        print("\n".join(task.name for task in pending))
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    policy = AutotunePolicy(True, num_iters=args.samples, budget_s=args.per_call)
    session = TableSession(builder, policy, args.budget)
    try:
        session.tune(pending)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    tuning.show_results(session.rows, session.failed, session.out)
    left = len(pending) - len(session.rows) - len(session.failed)
    print(f"{len(builder.entries)} entries in {builder.path}", end="")
    print(f"; {left} calls left: run it again" if left else "; all done")
    return 1 if session.failed or (pending and not session.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
