"""One search for the fastest config: compile in parallel, check one by one, time the valid ones.

The winner is the config whose forward and backward passes together take least, because that is
what training runs; of kernels without gradients, or that are not trained, and of calls with frozen
arguments, the forward pass alone.
Configs with separate ``fwd_params`` and ``bwd_params`` are taken apart within their platform: the
best forward tiles and the best backward tiles join, and win if together they are faster still.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

from ejkernel.ops.config.choice import AutotunePolicy
from ejkernel.ops.config.failures import FailureCache
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.errors import AutotuneError, warn_once
from ejkernel.ops.execution.candidates import Candidate, TooSlow, Workbench
from ejkernel.ops.execution.isolation import Surroundings
from ejkernel.ops.execution.progress import first_line
from ejkernel.ops.execution.timing import Timed, compare_programs
from ejkernel.ops.execution.trials import (
    BUDGET_SPENT,
    NOT_TRIED,
    STOPPED,
    AutotuneResult,
    Trial,
    failed,
)
from ejkernel.ops.platforms import Platform

FAILED_BEFORE = "failed before: "

# Compiling may take this part of the budget; later programs are left out.
COMPILE_SHARE = 0.7
# A later candidate must be this much faster than the heuristic config to replace it: less is noise.
LEAST_GAIN = 0.01
MOST_WORKERS = 16
# Their compilers run nothing on the device.
QUIET = (Platform.TRITON, Platform.PALLAS)


Compiling = dict[int, futures.Future[Any]]


class DeviceLock(Protocol):
    """A ``threading.Lock``, or an object with its methods."""

    def acquire(self) -> Any: ...

    def release(self) -> Any: ...


@dataclasses.dataclass(eq=False)
class Search:
    """The search of one call, run in a thread of its own.

    Attributes:
        call: the call.
        configs: the candidates; the first is the numeric reference.
        policy: counts and validation.
        budget_s: seconds for everything; one config is measured even when they are spent. A
            compilation or run that has begun is finished.
        surroundings: of the caller.
        on_trial: told every finished trial with its index.
        failures: what failed before, None = nothing is known or kept.
        note: told what else is worth a line.
        inputs: gives bound arguments to run on; None = generated ones.
        device_lock: held by one search at a time, from its first check to the end of its timing and
            while it makes its inputs, so that other searches may compile meanwhile; None = this
            is the only search. The budget does not count the wait for it.
        pruned: ``index -> reason`` of configs that are not compiled.
    """

    call: BoundCall
    configs: Sequence[Any]
    policy: AutotunePolicy
    budget_s: float
    surroundings: Surroundings
    on_trial: Callable[[Trial, int], None] = lambda trial, index: None
    failures: FailureCache | None = None
    note: Callable[[str], None] = lambda text: None
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    device_lock: DeviceLock | None = None
    pruned: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.waited = 0.0
        self.over = False
        self.stopped = threading.Event()
        self.trials: dict[int, Trial] = {}
        self.backward = False
        self.valid: list[Candidate] = []
        self.phases: dict[str, float] = {}
        self.best: tuple[Any, float] | None = None

    def stop(self) -> None:
        """Let the search end soon, with what was measured so far."""
        self.stopped.set()

    def find_best(self) -> None:
        """Finds ``best``, the fastest valid config and its milliseconds.

        Raises:
            AutotuneError: no candidate runs; one line per candidate says why.
        """
        with self._hold_device(), self._phase("inputs"):
            inputs = None if self.inputs is None else self.inputs()
            bench = Workbench(self.call, self.configs, self.policy.validate_backward, inputs)
        self.backward = bench.backward
        skipped = self._find_skip_reasons()
        pool = self._make_pool()
        try:
            with self._phase("compile"):
                compiling: Compiling = {
                    index: pool.submit(self.surroundings.run, self._compile, bench, cfg)
                    for index, cfg in enumerate(self.configs)
                    if index not in skipped
                }
                if self.device_lock is not None:
                    self._await_compilations(list(compiling.values()))
            with self._hold_device():
                with self._phase("compile" if self.device_lock is None else "check"):
                    ready = self._check_all(bench, compiling, skipped)
                with self._phase("time"):
                    self.best = self._select(bench, ready)
        finally:  # a compiler that takes longer than the budget is not waited for
            self.over = True
            pool.shutdown(wait=False, cancel_futures=True)

    def result(self, *, interrupted: bool) -> AutotuneResult:
        """Returns the outcome, once there is a ``best``."""
        assert self.best is not None
        return AutotuneResult(
            self.call.kernel,
            self.call.key,
            *self.best,
            trials=[self.trials[i] for i in sorted(self.trials)],
            seconds=time.monotonic() - self.started - self.waited,
            backward=self.backward,
            interrupted=interrupted,
            phases=self.phases,
        )

    def _select(self, bench: Workbench, ready: list[tuple[int, Candidate]]) -> tuple[Any, float]:
        if ready:
            self._time(bench, ready)
        if not self.valid:
            raise AutotuneError(self._all_failed())
        self._warn_if_only_the_heuristic_ran()
        return self._choose_winner(bench)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Generator[None]:
        started, waited = time.monotonic(), self.waited
        try:
            yield
        finally:
            seconds = time.monotonic() - started - (self.waited - waited)
            self.phases[name] = round(self.phases.get(name, 0.0) + seconds, 3)

    @contextlib.contextmanager
    def _hold_device(self) -> Generator[None]:
        """Holds the device for this search alone."""
        if self.device_lock is None:
            yield
            return
        self._acquire_device()
        try:
            yield
        finally:
            self.device_lock.release()

    def _acquire_device(self) -> None:
        started = time.monotonic()
        assert self.device_lock is not None
        self.device_lock.acquire()
        self.waited += time.monotonic() - started

    @contextlib.contextmanager
    def _release_device(self) -> Generator[None]:
        """Lets other searches use the device inside the block."""
        if self.device_lock is None:
            yield
            return
        self.device_lock.release()
        try:
            yield
        finally:
            self._acquire_device()

    def _deadline(self, share: float = 1.0) -> float:
        """Returns the end of this part of the budget, on ``time.monotonic``."""
        return self.started + self.waited + share * self.budget_s

    # ---- compile and check -----------------------------------------------------------------

    def _make_pool(self) -> futures.ThreadPoolExecutor:
        workers = max(1, min(len(self.configs), os.cpu_count() or 1, MOST_WORKERS))
        return futures.ThreadPoolExecutor(workers, thread_name_prefix="ejkernel-compile")

    def _compile(self, bench: Workbench, cfg: Any) -> Candidate:
        if self.device_lock is None or self.call.kernel.config_platform(cfg) in QUIET:
            return bench.compile(cfg)
        self.device_lock.acquire()  # XLA compares its own kernels on the device while it compiles
        try:
            if self.over:
                raise TimeoutError
            return bench.compile(cfg)
        finally:
            self.device_lock.release()

    def _await_compilations(self, compiling: Sequence[futures.Future[Any]]) -> None:
        """Waits until all are compiled, or until one is and the compile budget is spent."""
        pending, any_compiled = set(compiling), False
        while pending and not self.stopped.is_set():
            if any_compiled and time.monotonic() > self._deadline(COMPILE_SHARE):
                return
            done, pending = futures.wait(pending, 0.2, futures.FIRST_COMPLETED)
            any_compiled = any_compiled or any(future.exception() is None for future in done)

    def _check_all(
        self, bench: Workbench, compiling: Compiling, skipped: Mapping[int, str]
    ) -> list[tuple[int, Candidate]]:
        """The candidates that compile and compute the right values, in order."""
        ready: list[tuple[int, Candidate]] = []
        for index in skipped:
            self._trial(index, Trial(self.configs[index], error=skipped[index]))
        for index in self._iterate_compiled(compiling, ready):
            candidate = self._check_candidate(bench, compiling[index], index, wait=not ready)
            if candidate is not None:
                ready.append((index, candidate))
        return sorted(ready, key=lambda pair: pair[0])

    def _iterate_compiled(self, compiling: Compiling, ready: Sequence[Any]) -> Iterator[int]:
        """Yields indices in order until one is ``ready``, the reference; then as they are compiled.

        So the reference does not depend on the order in which threads end, and one slow
        compilation does not delay the others beyond the compile budget.
        """
        waiting = list(compiling)
        while waiting:
            next_ones = waiting if ready else waiting[:1]
            done = [i for i in next_ones if i == min(compiling) or compiling[i].done()]
            if not done and self.device_lock is None and not self.stopped.is_set():
                left = min(self._deadline(COMPILE_SHARE) - time.monotonic(), 0.2)
                if left > 0:
                    futures.wait([compiling[i] for i in next_ones], left, futures.FIRST_COMPLETED)
                    continue
            done = done or [i for i in waiting if compiling[i].done()]
            waiting.remove(index := (done or waiting)[0])
            yield index

    def _find_skip_reasons(self) -> dict[int, str]:
        """Returns why configs are not compiled; empty when all would be left out."""
        reasons = {index: NOT_TRIED + why for index, why in self.pruned.items()}
        if self.failures is not None:
            for index, cfg in enumerate(self.configs):
                why = self.failures.reason(self.call.key, cfg)
                if why is not None:
                    reasons[index] = FAILED_BEFORE + why
        return reasons if len(reasons) < len(self.configs) else {}

    def _check_candidate(
        self, bench: Workbench, future: futures.Future[Candidate], index: int, *, wait: bool
    ) -> Candidate | None:
        cfg = self.configs[index]
        try:
            candidate = self._await_candidate(future, wait)
            bench.check(candidate)
        except TimeoutError:
            self._trial(index, Trial(cfg, error=STOPPED if self.stopped.is_set() else BUDGET_SPENT))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._trial(index, Trial(cfg, error=reason))
            if self.failures is not None and not is_transient(error):
                self.failures.remember(self.call.key, cfg, first_line(reason))
        else:
            return candidate
        return None

    def _await_candidate(self, future: futures.Future[Candidate], wait: bool) -> Candidate:
        """The compiled candidate; TimeoutError when stopped or, unless ``wait``, out of time."""
        if not wait and time.monotonic() > self._deadline():
            raise TimeoutError  # running it once would take more time still
        while not future.done():
            if self.device_lock is not None:  # while the device is held, nothing is waited for
                raise TimeoutError
            left = self._deadline(COMPILE_SHARE) - time.monotonic()
            if self.stopped.is_set() or not (wait or left > 0.0):
                raise TimeoutError
            futures.wait([future], timeout=0.2 if wait else min(left, 0.2))
        return future.result()

    # ---- time ------------------------------------------------------------------------------

    def _time(self, bench: Workbench, ready: list[tuple[int, Candidate]]) -> None:
        end = self._deadline()
        forwards = list({id(c.forward): c.forward for _, c in ready}.values())
        half = end if not bench.backward else (time.monotonic() + end) / 2
        times = self._compare_programs(forwards, half)
        by_program = dict(zip(map(id, forwards), times, strict=True))
        totals: list[Timed | None] = [by_program[id(c.forward)] for _, c in ready]
        if bench.backward:
            totals = self._compare_programs([c.both for _, c in ready], end)
        for (index, candidate), total in zip(ready, totals, strict=True):
            fwd = by_program[id(candidate.forward)]
            if fwd is None or total is None:
                why = STOPPED if self.stopped.is_set() else BUDGET_SPENT
                self._trial(index, Trial(candidate.cfg, error=why))
                continue
            candidate.store_times(fwd.ms, total)
            self.valid.append(candidate)
            self._trial(index, candidate.trial)

    def _compare_programs(self, programs: Sequence[Any], deadline: float) -> list[Timed | None]:
        return compare_programs(
            programs,
            num_warmup=self.policy.num_warmup,
            num_iters=self.policy.num_iters,
            deadline=deadline,
            device=self.surroundings.device,
            stop=self.stopped.is_set,
            busy_host=self.device_lock is not None,
        )

    # ---- choose ----------------------------------------------------------------------------

    def _choose_winner(self, bench: Workbench) -> tuple[Any, float]:
        best = min(self.valid, key=lambda c: c.total_ms)
        if bench.backward:
            joined = self._join_best_passes(bench, best)
            if joined is not None and joined.total_ms < best.total_ms:
                best = joined
        first = self.valid[0]
        if first.cfg == self.configs[0] and first.total_ms <= best.total_ms * (1 + LEAST_GAIN):
            best = first
        return best.cfg, best.total_ms

    def _join_best_passes(self, bench: Workbench, best: Candidate) -> Candidate | None:
        """The best forward tiles with the best backward tiles of one platform, measured."""
        kernel = self.call.kernel
        groups: dict[Any, list[Candidate]] = {}
        for c in self.valid:
            if c.split:
                groups.setdefault(kernel.config_platform(c.cfg), []).append(c)

        def least(group: list[Candidate]) -> float:
            return min(c.fwd_ms for c in group) + min(c.bwd_ms or 0.0 for c in group)

        end = self._deadline()
        if not groups or self.stopped.is_set() or time.monotonic() > end:
            return None
        group = min(groups.values(), key=least)
        fwd = min(group, key=lambda c: c.fwd_ms)
        bwd = min(group, key=lambda c: c.bwd_ms or 0.0)
        cfg = dataclasses.replace(fwd.cfg, bwd_params=bwd.cfg.bwd_params)
        if least(group) >= best.total_ms or any(cfg == c.cfg for c in self.valid):
            return None
        try:
            with self._release_device():
                joined = self._compile(bench, cfg)
            bench.check(joined)
        except Exception as error:
            self.note(f"best tiles do not go together: {first_line(str(error))}")
            return None
        timed = self._compare_programs([joined.both, best.both], end)
        if timed[0] is None or timed[1] is None:
            return None
        # the two were timed together: only that comparison counts
        ratio = timed[0].ms / timed[1].ms
        together = Timed(best.total_ms * ratio, timed[0].spread)
        joined.store_times(fwd.fwd_ms, together)
        self._trial(len(self.configs), joined.trial)
        return joined

    # ---- report ----------------------------------------------------------------------------

    def _trial(self, index: int, trial: Trial) -> None:
        self.trials[index] = trial
        self.on_trial(trial, index)

    def _all_failed(self) -> str:
        lines = [f"{t.cfg!r}: {first_line(t.error)}" for _, t in sorted(self.trials.items())]
        return (
            f"autotuning kernel {self.call.kernel.name!r}, key {self.call.key!r}: every candidate "
            "failed:\n  " + "\n  ".join(lines)
        )

    def _warn_if_only_the_heuristic_ran(self) -> None:
        broken = [t for i, t in self.trials.items() if i and failed(t)]
        if broken and len(broken) == len(self.configs) - 1:
            warn_once(
                ("autotune", self.call.key),
                f"autotuning kernel {self.call.kernel.name!r}: all {len(broken)} candidates "
                f"failed, the heuristic config is used: {first_line(broken[0].error)}",
            )


def is_transient(error: Exception) -> bool:
    """Returns whether a failure may be gone the next time, as when memory was full."""
    text = str(error).lower()
    full = "out of memory" in text and "shared" not in text
    return isinstance(error, (MemoryError, TooSlow)) or full
