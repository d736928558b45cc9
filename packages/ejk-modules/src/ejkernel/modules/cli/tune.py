"""Find the fastest configurations and keep them, so that no call has to look for them later.

  ejk tune flash_attention --shape llama3-8b-4k
  ejk tune flash_attention b=2 s=8k h=32 hk=8 d=128
  ejk tune flash_attention --shapes          every named case for this device
  ejk tune --shapes                          the same for every operation
  ejk tune --recorded calls.json             calls that a program saved (save_invocations)

Winners go to the cache (`ejk cache ls`); Ctrl-C keeps what was measured. Calls that are tuned
already are left as they are unless --force is given.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ejkernel.modules.cli.app import (
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    CommandError,
    at_least_one,
    seconds,
)
from ejkernel.modules.cli.calls import add_arguments, calls_of, note_devices
from ejkernel.modules.cli.output import Output, counted


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, operation_optional=True)
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="a file of recorded calls")
    parser.add_argument("--force", action="store_true", help="tune again what is tuned already")
    parser.add_argument("--budget", type=seconds, metavar="S", help="seconds per call (60)")
    parser.add_argument("--total", type=seconds, metavar="S", help="seconds for everything")
    count: dict[str, Any] = {"type": at_least_one, "metavar": "N"}
    parser.add_argument("--iters", help="samples of the finalists (10)", **count)
    parser.add_argument("--candidates", help="most configs per call (12)", **count)
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write winners to a file")


def run_command(args: argparse.Namespace, out: Output) -> int:
    from ejkernel.modules._executor import get_default_executor
    from ejkernel.modules.cli.tuning import CANNOT, CacheSession, select_tasks, show_results

    tasks, left_out = _tasks(args, out)
    session = CacheSession(out, _options(args), args.total)
    persistent = getattr(get_default_executor().selector, "persistent", None)
    is_tuned = None if args.force or persistent is None else persistent.__contains__
    pending, skipped = select_tasks(tasks, is_tuned)
    status = OK
    try:
        session.tune(pending)
    except KeyboardInterrupt:
        status = INTERRUPTED
        out.note(f"interrupted: {len(session.rows)} measured and kept, the rest is as it was")
    skipped += session.failed
    record_path = _write_record(args, session.details, out)
    if args.table is not None and session.rows:
        from ejkernel.modules.cli.tables import write_table

        try:
            count = write_table(args.table, keys=[row["key"] for row in session.rows])
            out.note(f"wrote {counted(count, 'config')} to {args.table}")
        except OSError as error:  # the winners are in the cache, and are shown below
            out.note(f"{error.filename}: {error.strerror}")
            status = status or USAGE
    out.data(
        {
            "tuned": session.rows,
            "left": [{"operation": t.operation, "shape": t.case, "why": why} for t, why in skipped],
            "left_out": left_out,
            "record": None if record_path is None else str(record_path),
        }
    )
    show_results(session.rows, skipped, out)
    failed = left_out or any(why.startswith(CANNOT) for _, why in skipped)
    return status or (FAILED if failed else OK)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options = {"budget_s": args.budget, "num_iters": args.iters, "max_candidates": args.candidates}
    return {name: value for name, value in options.items() if value is not None}


def _tasks(args: argparse.Namespace, out: Output) -> tuple[list[Any], int]:
    """Returns the calls to tune, and the number of recorded calls that cannot be read here."""
    from ejkernel.modules.cli.tuning import task_of
    from ejkernel.modules.workloads.find import operation_names

    if args.recorded is not None:
        if args.operation or args.shape:
            raise CommandError("--recorded says itself what to tune: give no OP and no --shape")
        return _recorded_tasks(args.recorded, out)
    if args.operation is None and args.shape is None:
        raise CommandError("give an operation, --shapes, or --recorded FILE; see ejk tune --help")
    names = operation_names() if args.operation is None else [args.operation]
    calls = [call for name in names for call in calls_of(name, args.shape, args.words)]
    note_devices(out, calls)
    return list(map(task_of, calls)), 0


def _recorded_tasks(path: Path, out: Output) -> tuple[list[Any], int]:
    from ejkernel.modules.cli.tuning import Task
    from ejkernel.ops import load_invocations
    from ejkernel.ops.utils.files import parse_json, read_text

    try:
        invocations = load_invocations(path)
        recorded = len(parse_json(read_text(path))["calls"])
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    if not recorded:
        raise CommandError(f"{path}: holds no recorded calls", FAILED)
    left_out = recorded - len(invocations)
    if left_out:
        message = (
            f"{path}: {left_out} of {counted(recorded, 'recorded call')} left out; kernels of your "
            "own become known with --import MODULE"
        )
        if not invocations:
            raise CommandError(message, FAILED)
        out.note(message)
    tasks = [
        Task(inv.kernel.name, f"recorded {index}", inv, may_fail=True)
        for index, inv in enumerate(invocations, 1)
    ]
    return tasks, left_out


def _write_record(
    args: argparse.Namespace, trials: list[dict[str, Any]], out: Output
) -> Path | None:
    """Keeps every trial for `ejk report`; None when there is nothing to keep."""
    if not trials:
        return None
    from ejkernel.modules.bench import record

    name = args.operation or (args.recorded.stem if args.recorded else "all")
    try:
        return record.write("tune", name, {"op": name, "trials": trials})
    except OSError as error:
        out.note(f"the trials were not recorded: {error}")
        return None
