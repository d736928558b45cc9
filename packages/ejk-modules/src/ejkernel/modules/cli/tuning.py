"""The tuning of several calls in a row, for ``ejk tune`` and for shipped tables."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ejkernel.modules._executor import get_default_executor
from ejkernel.modules.bench.record import config_fields, config_text
from ejkernel.modules.cli.output import Output
from ejkernel.modules.workloads.call import Call
from ejkernel.ops import AutotuneResult, Invocation
from ejkernel.ops.execution.autotuner import OnTrial
from ejkernel.ops.execution.progress import first_line

CANNOT = "cannot be tuned: "
GOOD_HEURISTIC = 1.15
"""A heuristic config within this of the tuned one counts as good."""


@dataclass(frozen=True)
class Task:
    """A call to tune.

    Attributes:
        operation: name of the function.
        case: name of the call.
        inv: the call itself.
        call: the named workload, where it is one.
        may_fail: whether an error is noted and the next call tuned; else it is raised.
    """

    operation: str
    case: str
    inv: Invocation
    call: Call | None = None
    may_fail: bool = False

    @property
    def name(self) -> str:
        return f"{self.operation} {self.case}"


def task_of(call: Call, *, may_fail: bool = False) -> Task:
    """Returns the task of tuning a named workload."""
    return Task(call.operation, call.name, call.invocation(), call, may_fail)


def select_tasks(
    tasks: Iterable[Task],
    is_tuned: Callable[[str], bool] | None = None,
    count: Callable[[Task], int] | None = None,
) -> tuple[list[Task], list[tuple[Task, str]]]:
    """Returns the tasks to tune, bound, and the others with the reason why not.

    Args:
        tasks: calls, of which several may share a key.
        is_tuned: whether the call of a key has a tuned config; None = all are tuned again.
        count: number of candidates of a bound task; None = the kernel's.
    """
    pending: list[Task] = []
    skipped: list[tuple[Task, str]] = []
    seen: dict[str, str] = {}
    for task in tasks:
        task = replace(task, inv=task.inv.bound)
        key = task.inv.key
        if key in seen:
            skipped.append((task, f"shares its configuration with {seen[key]}"))
            continue
        seen[key] = task.case
        try:
            candidates = (count or _count_candidates)(task)
        except Exception as error:
            if not task.may_fail:
                raise
            skipped.append((task, _reason(error)))
            continue
        if candidates < 2:
            skipped.append((task, "one candidate here, nothing to choose" if candidates else
                            "nothing to tune"))  # fmt: skip
        elif is_tuned is not None and is_tuned(key):
            skipped.append((task, "tuned already; --force tunes it again"))
        else:
            pending.append(task)
    return pending, skipped


def _count_candidates(task: Task) -> int:
    kernel = task.inv.kernel
    return len(kernel.config_space(task.inv)) if kernel.has_tunables else 0


def _reason(error: Exception) -> str:
    return f"{CANNOT}{type(error).__name__}: {first_line(str(error))[:200]}"


class Session(ABC):
    """Tunes calls one after the other.

    Args:
        out: where progress and remarks go.
        total_s: seconds for all calls; those not begun by then are left out. None = no bound.

    Attributes:
        rows: what came of each call, as JSON values; ``details`` has the trials too.
        failed: the tasks that could not be tuned, with the reason.
        max_candidates: of a call.
    """

    max_candidates = 12

    def __init__(self, out: Output, total_s: float | None):
        self.out = out
        self.total_s = total_s
        self.rows: list[dict[str, Any]] = []
        self.details: list[dict[str, Any]] = []
        self.failed: list[tuple[Task, str]] = []

    @abstractmethod
    def search(
        self, task: Task, on_trial: OnTrial, remaining_s: float | None
    ) -> AutotuneResult | None:
        """Tunes a call and stores the winner; None if there was nothing to do."""

    def store_partial(self, task: Task, result: AutotuneResult) -> bool:
        """Stores the best of an interrupted search; returns whether it counts as a winner."""
        return False

    def tune(self, tasks: Sequence[Task]) -> None:
        """Tunes the calls in their order.

        Raises:
            KeyboardInterrupt: finished calls are stored.
        """
        end = None if self.total_s is None else time.monotonic() + self.total_s
        for task in tasks:
            remaining = None if end is None else end - time.monotonic()
            if remaining is not None and remaining <= 0:
                break
            with self.out.progress(task.name, self.max_candidates) as advance:
                self._tune_one(task, _progress(advance), remaining)

    def _tune_one(self, task: Task, on_trial: OnTrial, remaining_s: float | None) -> None:
        try:
            result = self.search(task, on_trial, remaining_s)
        except Exception as error:
            if not task.may_fail:
                raise
            self.failed.append((task, _reason(error)))
        except KeyboardInterrupt as stop:
            partial = getattr(stop, "partial", None)
            if partial is not None and self.store_partial(task, partial):
                self._add_row(task, partial)
            raise
        else:
            if result is not None:
                self._add_row(task, result)

    def _add_row(self, task: Task, result: AutotuneResult) -> None:
        stored = result.best_ms is not None and result.compared
        if result.best_ms is not None and not stored:
            self.out.note(
                f"{task.name}: {result.timed} of {len(result.trials)} candidates timed in "
                f"{result.seconds:.1f} s: not enough compared, nothing stored (--budget gives more "
                "time)"
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
        names = ("ms", "fwd_ms", "bwd_ms", "error")
        trials = [
            {"config": config_fields(t.cfg), **{name: getattr(t, name) for name in names}}
            for t in result.trials
        ]
        self.details.append({**row, "trials": trials})


class CacheSession(Session):
    """Stores winners where the default executor looks for them.

    ``options``: of ``autotune_recorded``.
    """

    def __init__(self, out: Output, options: dict[str, Any], total_s: float | None):
        super().__init__(out, total_s)
        self.options = options
        self.max_candidates = options.get("max_candidates", self.max_candidates)

    def search(
        self, task: Task, on_trial: OnTrial, remaining_s: float | None
    ) -> AutotuneResult | None:
        from ejkernel import ops

        results = ops.autotune_recorded(
            [task.inv], total_s=remaining_s, on_trial=on_trial, **self.options
        )
        return results[0] if results else None

    def store_partial(self, task: Task, result: AutotuneResult) -> bool:
        store = getattr(get_default_executor().selector, "store", None)
        if store is None or not result.compared:
            return False
        store(result.key, result.best, task.inv.payload, result.measured())
        return True


def _progress(advance: Any) -> OnTrial:
    """Returns a callback that shows each trial and the best time so far."""
    times: list[float] = []

    def on_trial(trial: Any, index: int, total: int) -> None:
        if trial.ms is None:
            advance(f"skipped: {first_line(trial.error)[:60]}", total)
            return
        times.append(trial.ms)
        advance(f"{trial.ms:.4f} ms, best {min(times):.4f} ms  {config_text(trial.cfg)}", total)

    return on_trial


def show_results(
    rows: Sequence[dict[str, Any]], skipped: Sequence[tuple[Task, str]], out: Output
) -> None:
    """Shows the tuned calls, and the others with the reasons."""
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
        good = sum((r["heuristic_over_best"] or 1.0) <= GOOD_HEURISTIC for r in rows)
        out.text(f"{good} of {len(rows)} heuristic configs are within 15% of the tuned ones")
    if skipped:
        out.title("left as they are")
        by_reason: dict[str, list[str]] = {}
        for task, why in skipped:
            by_reason.setdefault(why, []).append(task.name)
        for why, names in by_reason.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            out.fields([(why, shown)])
