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
from dataclasses import dataclass, replace
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
from ejkernel.modules.cli.calls import add_arguments, calls_of, say_where
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


CANNOT = "cannot be tuned: "


@dataclass(frozen=True)
class Task:
    """One call to tune. ``case``: what it is called; ``operation``: of which function.

    ``recorded``: from a file, so that it may be no call that the operation allows.
    """

    operation: str
    case: str
    inv: Any
    recorded: bool = False


def run(args: argparse.Namespace, out: Output) -> int:
    tasks, left_out = _tasks(args, out)
    session = Session(out, _options(args), args.total)
    pending, skipped = _sorted_out(tasks, args.force)
    status = OK
    try:
        for task in pending:
            session.tune(task)
    except KeyboardInterrupt:
        status = INTERRUPTED
        out.note(f"interrupted: {len(session.rows)} measured and kept, the rest is as it was")
    skipped += session.failed
    record_path = session.write_record(args)
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
    _show(session.rows, skipped, out)
    failed = left_out or any(why.startswith(CANNOT) for _, why in skipped)
    return status or (FAILED if failed else OK)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    given = {"budget_s": args.budget, "num_iters": args.iters, "max_candidates": args.candidates}
    return {name: value for name, value in given.items() if value is not None}


# ---- what to tune ------------------------------------------------------------------------------


def _tasks(args: argparse.Namespace, out: Output) -> tuple[list[Task], int]:
    """The calls to tune, and the number of recorded calls that this process cannot read."""
    if args.recorded is not None:
        if args.operation or args.shape:
            raise CommandError("--recorded says itself what to tune: give no OP and no --shape")
        return _recorded(args.recorded, out)
    from ejkernel.modules.workloads.find import operation_names

    if args.operation is None and args.shape is None:
        raise CommandError("give an operation, --shapes, or --recorded FILE; see ejk tune --help")
    names = operation_names() if args.operation is None else [args.operation]
    calls = [call for name in names for call in calls_of(name, args.shape, args.words)]
    say_where(out, calls)
    return [Task(call.operation, call.name, call.invocation()) for call in calls], 0


def _recorded(path: Path, out: Output) -> tuple[list[Task], int]:
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
        told = (
            f"{path}: {left_out} of {counted(recorded, 'recorded call')} left out; kernels of your "
            "own become known with --import MODULE"
        )
        if not invocations:
            raise CommandError(told, FAILED)
        out.note(told)
    tasks = [
        Task(inv.kernel.name, f"recorded {index}", inv, recorded=True)
        for index, inv in enumerate(invocations, 1)
    ]
    return tasks, left_out


def _sorted_out(tasks: list[Task], force: bool) -> tuple[list[Task], list[tuple[Task, str]]]:
    """The calls to tune, and the others with the reason why not."""
    from ejkernel.modules._executor import get_default_executor

    persistent = getattr(get_default_executor().selector, "persistent", None)
    pending: list[Task] = []
    skipped: list[tuple[Task, str]] = []
    seen: dict[str, str] = {}
    for task in tasks:
        call, kernel = task.inv.bound, task.inv.kernel
        if call.key in seen:
            skipped.append((task, f"shares its configuration with {seen[call.key]}"))
            continue
        seen[call.key] = task.case
        try:
            count = len(kernel.config_space(call)) if kernel.has_tunables else 0
        except Exception as error:
            if not task.recorded:
                raise
            skipped.append((task, _cannot(error)))
            continue
        if count < 2:
            skipped.append((task, "one candidate here, nothing to choose" if count else
                            "nothing to tune"))  # fmt: skip
        elif not force and persistent is not None and call.key in persistent:
            skipped.append((task, "tuned already; --force tunes it again"))
        else:
            pending.append(replace(task, inv=call))
    return pending, skipped


def _cannot(error: Exception) -> str:
    from ejkernel.ops.execution.progress import first_line

    return f"{CANNOT}{type(error).__name__}: {first_line(str(error))[:200]}"


# ---- tuning ------------------------------------------------------------------------------------


class Session:
    """What one run of the command has tuned so far."""

    def __init__(self, out: Output, options: dict[str, Any], total_s: float | None):
        import time

        self.out = out
        self.options = options
        self.end = None if total_s is None else time.monotonic() + total_s
        self.rows: list[dict[str, Any]] = []
        self.details: list[dict[str, Any]] = []
        self.failed: list[tuple[Task, str]] = []

    def tune(self, task: Task) -> None:
        """Tune one call and keep the winner.

        Raises:
            KeyboardInterrupt: after keeping the best of what was measured.
        """
        import time

        from ejkernel.modules.bench.record import config_text
        from ejkernel.ops import autotune_recorded
        from ejkernel.ops.execution.progress import first_line

        left = None if self.end is None else max(self.end - time.monotonic(), 0.0)
        most = self.options.get("max_candidates", 12)
        with self.out.progress(f"{task.operation} {task.case}", most) as advance:
            best: list[float] = []

            def on_trial(trial: Any, index: int, total: int) -> None:
                if trial.ms is None:
                    advance(f"skipped: {first_line(trial.error)[:60]}", total)
                    return
                best.append(trial.ms)
                so_far = f"{trial.ms:.4f} ms, best {min(best):.4f} ms"
                advance(f"{so_far}  {config_text(trial.cfg)}", total)

            try:
                autotune_recorded(
                    [task.inv],
                    total_s=left,
                    on_trial=on_trial,
                    on_result=lambda result: self._keep(task, result),
                    **self.options,
                )
            except Exception as error:
                if not task.recorded:
                    raise
                self.failed.append((task, _cannot(error)))
            except KeyboardInterrupt as stop:
                self._keep_partial(task, getattr(stop, "partial", None))
                raise

    def _keep_partial(self, task: Task, result: Any) -> None:
        """The best of an interrupted search, unless nothing was compared, counts as a winner."""
        from ejkernel.modules._executor import get_default_executor

        chain = get_default_executor().selector
        store = getattr(chain, "store", None)
        if result is None or store is None or not result.compared:
            return
        store(result.key, result.best, task.inv.payload, result.measured())
        self._keep(task, result)

    def _keep(self, task: Task, result: Any) -> None:
        from ejkernel.modules.bench.record import config_fields

        stored = result.best_ms is not None and result.compared
        if result.best_ms is not None and not stored:
            self.out.note(
                f"{task.operation} {task.case}: {result.timed} of {len(result.trials)} candidates "
                f"timed in {result.seconds:.1f} s: not enough compared, nothing stored "
                "(--budget gives more time)"
            )
        gain = None
        if result.best_ms and result.heuristic_ms:
            gain = result.heuristic_ms / result.best_ms
        row = {
            "operation": task.operation,
            "shape": task.case,
            "key": result.key,
            "pass": "fwd+bwd" if result.backward else "fwd",
            "heuristic_ms": result.heuristic_ms,
            "best_ms": result.best_ms,
            "heuristic_over_best": gain,
            "spread": result.spread,
            "seconds": round(result.seconds, 2),
            "candidates": len(result.trials),
            "timed": result.timed,
            "stored": stored,
            "interrupted": result.interrupted,
            "config": config_fields(result.best),
        }
        self.rows.append(row)
        kept = ("ms", "fwd_ms", "bwd_ms", "error")
        trials = [
            {"config": config_fields(t.cfg), **{name: getattr(t, name) for name in kept}}
            for t in result.trials
        ]
        self.details.append({**row, "trials": trials})

    def write_record(self, args: argparse.Namespace) -> Path | None:
        """Keep every trial for `ejk report`; None when there is nothing to keep."""
        if not self.details:
            return None
        from ejkernel.modules.bench import record

        name = args.operation or (args.recorded.stem if args.recorded else "all")
        try:
            return record.write("tune", name, {"op": name, "trials": self.details})
        except OSError as error:
            self.out.note(f"the trials were not recorded: {error}")
            return None


def _show(rows: list[dict[str, Any]], skipped: list[tuple[Task, str]], out: Output) -> None:
    from ejkernel.modules.bench.record import config_text

    if rows:
        out.title("tuned")
        out.table(
            ("operation", "shape", "pass", "heuristic ms", "best ms", "gain", "s", "config"),
            [
                (
                    r["operation"], r["shape"], r["pass"], r["heuristic_ms"], r["best_ms"],
                    None if r["heuristic_over_best"] is None
                    else f"{r['heuristic_over_best']:.2f}x",
                    f"{r['seconds']:.1f}", config_text(r["config"]),
                )
                for r in rows
            ],
            right=(3, 4, 5, 6),
        )  # fmt: skip
        within = sum((r["heuristic_over_best"] or 1.0) <= 1.15 for r in rows)
        out.text(f"{within} of {len(rows)} heuristic configs are within 15% of the tuned ones")
    if skipped:
        out.title("left as they are")
        by_reason: dict[str, list[str]] = {}
        for task, why in skipped:
            by_reason.setdefault(why, []).append(f"{task.operation} {task.case}")
        for why, names in by_reason.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            out.fields([(why, shown)])
