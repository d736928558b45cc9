"""Tests that need a GPU, in several processes that share it, until a time limit.

    python tools/gpu/run_tests.py                                  # everything marked gpu
    python tools/gpu/run_tests.py --seconds 500 FILE::TEST FILE     # in this order
    python tools/gpu/run_tests.py --devices 4 --processes 56        # each process has one of them

Most of the time of such a test is a compiler's, on one core: a single process leaves the GPU idle.
A process takes the next test when it has finished one. A process that dies, or whose context on
the GPU is lost, is replaced, and the test is a failure. Whatever does not pass is printed at once,
the table of files last: what passed, what failed and what was left at the limit, at Ctrl-C or
at the signal of ``timeout``. Exits with 1 after a failure and with 2 where tests are left.
Arguments that are not listed here go to pytest.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu.processes import (  # noqa: E402
    LOST_CONTEXT,
    interrupt_at_sigterm,
    run_processes,
    visible_gpus,
)


class Report(NamedTuple):
    """A message about a test: ``started``, or its outcome with seconds and reason."""

    process: int
    test: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""


class Worker:
    """A plugin of pytest that runs the tests which no other process has taken.

    Attributes:
        number: of this process.
        counter: the index of the next test, shared by the processes.
        deadline: of ``time.time``, after which no test starts.
        reports: where to say what became of a test.
        lost: whether the context on the GPU is lost.
    """

    def __init__(self, number: int, counter: Any, deadline: float, reports: Any) -> None:
        self.number, self.counter = number, counter
        self.deadline, self.reports = deadline, reports
        self.lost = False

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # a file that cannot be imported; the tests of other files run
            reason = report.longreprtext.splitlines()[-1]
            self.reports.put(Report(self.number, report.nodeid, "failed", 0.0, reason))

    def pytest_collection_finish(self, session: Any) -> None:
        self.reports.put([item.nodeid for item in session.items])

    def pytest_runtestloop(self, session: Any) -> bool:
        while not self.lost and time.time() < self.deadline:
            with self.counter.get_lock():
                index, self.counter.value = self.counter.value, self.counter.value + 1
            if index >= len(session.items):
                break
            item = session.items[index]
            self.reports.put(Report(self.number, item.nodeid, "started"))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        reason = "" if report.outcome == "passed" else report.longreprtext
        self.lost |= report.outcome == "failed" and any(x in reason for x in LOST_CONTEXT)
        lines = [line for line in reason.splitlines() if line.startswith("E ")]
        reason = (lines or reason.splitlines()[-1:] or [""])[0]
        self.reports.put(
            Report(self.number, report.nodeid, report.outcome, report.duration, reason)
        )


def run_worker(
    number: int,
    gpus: list[str] | None,
    arguments: list[str],
    counter: Any,
    deadline: float,
    reports: Any,
) -> None:
    """The body of a process, which sees one of the GPUs that are named, or all there are."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    sys.stdout = sys.stderr = open(os.devnull, "w")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # each compiles and computes for the tests that it takes, not ahead for all of a file
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"
    os.chdir(ROOT)
    import pytest

    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--continue-on-collection-errors"]
    pytest.main([*options, *arguments], plugins=[Worker(number, counter, deadline, reports)])


@dataclass
class Outcomes:
    """Outcomes of the tests so far."""

    tests: list[str] | None = None
    done: dict[str, Report] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)

    def add(self, report: Report | list[str]) -> None:
        if isinstance(report, list):
            self.tests = self.tests or report
        elif report.outcome == "started":
            self.running[report.process] = report.test
        else:
            self.finish(report)

    def finish(self, report: Report) -> None:
        """Keeps the first failure of a test, which may also fail while it is torn down."""
        previous = self.done.get(report.test)
        if previous is not None and (previous.outcome == "failed" or report.outcome == "passed"):
            return
        self.running.pop(report.process, None)
        self.done[report.test] = report
        if report.outcome != "passed":
            row = f"{report.outcome:<8} {report.seconds:6.1f} s  {report.test}  {report.reason}"
            print(row, flush=True)

    def crash(self, process: int, code: int | None) -> None:
        """Counts the test that a process died of as failed."""
        if process in self.running:
            test = self.running[process]
            self.finish(Report(process, test, "failed", 0.0, f"process ended with {code}"))

    @property
    def left(self) -> list[str]:
        return [test for test in self.tests or () if test not in self.done]

    def table(self) -> Iterable[str]:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        seconds: Counter[str] = Counter()
        for report in self.done.values():
            name = report.test.partition("::")[0]
            counts[name][report.outcome] += 1
            seconds[name] += report.seconds
        for test in self.left:
            counts[test.partition("::")[0]]["left"] += 1
        columns = ("passed", "failed", "skipped", "left")
        yield f"{'':<50}" + "".join(f"{c:>9}" for c in columns) + f"{'seconds':>9}"
        for name, row in counts.items():
            numbers = "".join(f"{row[c]:>9}" for c in columns)
            yield f"{Path(name).name:<50}{numbers}{seconds[name]:>9.0f}"


def run_tests(
    arguments: list[str], processes: int, seconds: float, gpus: list[str] | None = None
) -> Outcomes:
    """Runs the tests, each process on one of the GPUs if they are named, and returns outcomes."""
    outcomes = Outcomes()

    def continues(process: int, code: int | None, index: int) -> bool:
        outcomes.crash(process, code)
        return bool(outcomes.tests) and index < len(outcomes.tests)

    run_processes(
        run_worker, (gpus, arguments), processes, seconds,
        receive=outcomes.add, continues=continues,
    )  # fmt: skip
    return outcomes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seconds", type=float, default=540, help="no test starts after these")
    parser.add_argument(
        "--devices", type=int, default=0, help="GPUs over which processes are spread"
    )
    parser.add_argument("-m", default="gpu", dest="marks", help="pytest's expression of marks")
    options, arguments = parser.parse_known_args(argv)
    if options.processes < 1 or options.seconds <= 0:
        parser.error("--processes and --seconds must be above 0")
    interrupt_at_sigterm()
    outcomes = run_tests(
        ["-m", options.marks, *arguments],
        options.processes,
        options.seconds,
        visible_gpus(options.devices),
    )
    if outcomes.tests is None:
        print("no process could collect the tests: run pytest by itself to see why")
        return 1
    failed = [report for report in outcomes.done.values() if report.outcome == "failed"]
    print(*(f"FAILED {report.test}  {report.reason}" for report in failed), sep="\n")
    print(*outcomes.table(), sep="\n")
    return 1 if failed or not outcomes.tests else 2 if outcomes.left else 0


if __name__ == "__main__":
    sys.exit(main())
