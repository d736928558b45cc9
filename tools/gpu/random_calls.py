"""Random calls of every operation on every platform, compared with float64, until a time limit.

    python tools/gpu/random_calls.py --seconds 500               # in several processes
    python tools/gpu/random_calls.py --devices 4 --seed 1 --seconds 500
    python tools/gpu/random_calls.py --only ragged_page_attention,mla_decode --seconds 60
    python tools/gpu/random_calls.py --seed 1 --only flash_attention:17    # one call, in detail

``ejktest.random_calls`` draws the calls: lengths, heads, dims, page sizes, dtypes and options that
no table of tests has together. The reference is the call in float64 on the CPU, by the XLA
implementation, which ``--platform numpy`` compares with the oracles of the tests. Each platform
runs a call twice, after freed memory of the device was filled with two patterns, the first of them
NaN in every dtype: the bits of both runs are the same. A platform that refuses a call by
``KernelNotSupported`` is counted; any other exception, a result that is too far off, NaN, or other
bits are failures, which are printed at once with the line that repeats them. The table is printed
last, also at Ctrl-C: calls, refused, failed, and the largest error as a share of the bound.
Without a GPU, kernels run in their interpreters. Exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

from gpu.call_outcomes import ORACLE, Outcome, outcomes_of  # noqa: E402
from gpu.processes import (  # noqa: E402
    LOST_CONTEXT,
    interrupt_at_sigterm,
    run_processes,
    visible_gpus,
)

PLATFORMS = ("xla", "triton", "pallas", "cuda")
CALL_SECONDS = 240
"""A call that takes longer has failed."""


class Job(NamedTuple):
    """A call that a process begins."""

    process: int
    operation: str
    number: int
    started: float


def run_worker(number: int, work: Work, counter: Any, deadline: float, reports: Any) -> None:
    """The body of a process: it takes the next call when it has finished one."""
    gpus = visible_gpus(work.devices)
    prepare(gpus[number % len(gpus)] if gpus else None)
    import jax

    try:
        checkout.register()
        while time.time() < deadline:
            with counter.get_lock():
                index, counter.value = counter.value, counter.value + 1
            job = work.job(index)
            if job is None:
                return
            reports.put(Job(number, *job, time.time()))
            for outcome in outcomes_of(job[0], work.seed, job[1], work.platforms):
                reports.put(outcome)
                if any(word in outcome.reason for word in LOST_CONTEXT):
                    return
            if index % 10 == 0:
                jax.clear_caches()  # of programs that no other call runs
    except BaseException:
        traceback.print_exc()
        raise


def prepare(gpu: str | None) -> None:
    """Sets what a process must know before it imports JAX."""
    os.environ.setdefault("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share a GPU
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    backends = os.environ.get("JAX_PLATFORMS", "")
    if backends and "cpu" not in backends.split(","):
        os.environ["JAX_PLATFORMS"] = f"{backends},cpu"  # where the reference runs
    flags = os.environ.get("XLA_FLAGS", "")
    # XLA's own matmuls are run once
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {flags}".strip()


@dataclass(frozen=True)
class Work:
    """The calls of a run: ``operations`` alternate, ``count`` of each or without end."""

    operations: tuple[str, ...]
    seed: int
    platforms: tuple[str, ...]
    count: int | None
    devices: int

    def job(self, index: int) -> tuple[str, int] | None:
        number, index = divmod(index, len(self.operations))
        if self.count is not None and number >= self.count:
            return None
        return self.operations[index], number


@dataclass
class Table:
    """Outcomes of all calls."""

    seed: int
    cells: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    shares: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        cell = outcome.operation, outcome.platform
        self.cells[cell][outcome.outcome] += 1
        if outcome.share > self.shares.get(cell, (0.0, 0))[0]:
            self.shares[cell] = outcome.share, outcome.number
        if outcome.outcome == "failed":
            name = f"{outcome.operation}:{outcome.number}"
            print(
                f"FAILED --seed {self.seed} --only {name} --platform {outcome.platform}  "
                f"{outcome.reason}",
                flush=True,
            )

    @property
    def failed(self) -> int:
        return sum(cell["failed"] for cell in self.cells.values())

    def lines(self) -> Iterator[str]:
        yield f"{'':<30}{'':<9}{'calls':>7}{'refused':>9}{'failed':>8}{'worst':>8}  its number"
        for (operation, platform), cell in sorted(self.cells.items()):
            share, number = self.shares.get((operation, platform), (0.0, 0))
            calls = f"{sum(cell.values()):>7}{cell['refused']:>9}{cell['failed']:>8}"
            yield f"{operation:<30}{platform:<9}{calls}{share:>8.2f}  {number}"


def run_calls(work: Work, processes: int, seconds: float) -> Table:
    """Runs calls in processes that share a GPU, and replaces those that die."""
    table, running = Table(work.seed), dict[int, Job]()

    def receive(report: Job | Outcome) -> None:
        if isinstance(report, Job):
            running[report.process] = report
        else:
            table.add(report)

    def is_stuck(process: int) -> bool:
        job = running.get(process)
        return job is not None and time.time() - job.started > CALL_SECONDS

    def continues(process: int, code: int | None, index: int) -> bool:
        late, job = is_stuck(process), running.pop(process, None)
        begun = job is not None
        if code:
            reason = f"over {CALL_SECONDS} s" if late else f"process ended with {code}"
            name = (job.operation, job.number) if begun else ("none", 0)
            table.add(Outcome(*name, "any", "failed", 0.0, reason))
        return (begun or not code) and work.job(index) is not None

    run_processes(
        run_worker, (work,), processes, seconds,
        receive=receive, continues=continues, is_stuck=is_stuck,
    )  # fmt: skip
    return table


def main(argv: Sequence[str] | None = None) -> int:
    from ejktest.random_calls import DRAWN

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="operations, or one call as NAME:NUMBER")
    parser.add_argument(
        "--platform", action="append", choices=[*PLATFORMS, ORACLE],
        help=f"all but {ORACLE}, which holds the reference to the formulas of the tests",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=500, help="no call starts after these")
    parser.add_argument("--count", type=int, help="calls of each operation; else until the limit")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--devices", type=int, default=0, help="spread processes over this many")
    options = parser.parse_args(argv)
    selected = {*(options.platform or PLATFORMS)}
    if selected != {ORACLE}:
        selected.add("xla")  # whose error others may have too
    platforms = tuple(p for p in (*PLATFORMS, ORACLE) if p in selected)
    names = options.only.split(",") if options.only else list(DRAWN)
    unknown = [name for name in names if name.partition(":")[0] not in DRAWN]
    if unknown:
        parser.error(f"no operation {unknown[0]!r}; there are: {', '.join(DRAWN)}")
    numbered = [name.partition(":")[::2] for name in names if ":" in name]
    if not all(number.isdecimal() for _, number in numbered):
        parser.error(f"--only: given {options.only!r}, expected NAME:NUMBER of one call")
    if options.processes < 1 or options.devices < 0:
        parser.error("--processes must be above 0, and --devices not below 0")
    if numbered:
        prepare(None)
        checkout.register()
        table = Table(options.seed)
        for name, number in numbered:
            for outcome in outcomes_of(name, options.seed, int(number), platforms, verbose=True):
                print(outcome.platform, outcome.outcome, f"{outcome.share:.2f}", outcome.reason)
                table.add(outcome)
        return int(table.failed > 0)
    interrupt_at_sigterm()
    work = Work(tuple(names), options.seed, platforms, options.count, options.devices)
    table = run_calls(work, options.processes, options.seconds)
    print(*table.lines(), sep="\n")
    return 1 if table.failed or not table.cells else 0


if __name__ == "__main__":
    sys.exit(main())
