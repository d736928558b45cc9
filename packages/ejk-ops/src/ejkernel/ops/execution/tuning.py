"""Autotuning: compile candidates side by side, check their values, time the sound ones."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ejkernel.ops import env
from ejkernel.ops.config.selection import AutotunePolicy, ConfigSelectorChain
from ejkernel.ops.core.abstract import bind_abstract
from ejkernel.ops.core.invocation import Invocation, call_invocation
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.errors import (
    AutotuneError,
    ConfigError,
    KernelNotSupported,
    warn_once,
)
from ejkernel.ops.execution.candidates import Candidate, Workbench
from ejkernel.ops.execution.isolation import Surroundings, outside_trace
from ejkernel.ops.execution.progress import Reporter, first_line
from ejkernel.ops.execution.timing import benchmark, check_counts, time_side_by_side
from ejkernel.ops.execution.trials import AutotuneResult, Trial
from ejkernel.ops.utils.device import target_device

if TYPE_CHECKING:
    from ejkernel.ops.execution.executor import Executor

__all__ = [
    "AutotuneResult",
    "Autotuner",
    "Trial",
    "Tuner",
    "autotune",
    "autotune_recorded",
    "benchmark",
]

BUDGET_SPENT = "the time budget was spent"

OnTrial = Callable[[Trial, int, int], None]


@dataclasses.dataclass(frozen=True)
class Tuner:
    """Ranks functions by time: warm-up, then turns, every sample waited for.

    Args:
        num_warmup: calls of each function before timing.
        num_iters: samples per function.
    """

    num_warmup: int = 3
    num_iters: int = 10

    def __post_init__(self) -> None:
        check_counts(self.num_warmup, self.num_iters)

    def measure(
        self, fns: Sequence[Callable[[], Any]], deadline: float | None = None
    ) -> list[float | None]:
        """Median milliseconds per function; None for those not reached before ``deadline``."""
        return time_side_by_side(
            fns, num_warmup=self.num_warmup, num_iters=self.num_iters, deadline=deadline
        )


class Autotuner:
    """Finds the fastest sound config of a call. Stores nothing.

    The heuristic config is candidate 0 and the numeric reference; if it fails, the first
    candidate that runs is. Works inside a trace: everything happens in another thread, on inputs
    made by ``kernel.sample_inputs``.

    Args:
        policy: counts, budget and validation of gradients.
        on_trial: called with each finished trial, its index and the number of candidates.
    """

    def __init__(self, policy: AutotunePolicy | None = None, on_trial: OnTrial | None = None):
        self.policy = AutotunePolicy() if policy is None else policy
        self.tuner = Tuner(self.policy.num_warmup, self.policy.num_iters)
        self.on_trial = on_trial

    def tune(self, inv: Invocation, configs: Sequence[Any] | None = None) -> AutotuneResult:
        """Tune one call.

        Args:
            inv: the call; its arrays may be abstract or tracers.
            configs: candidates; None = ``kernel.config_space(inv)``.

        Raises:
            AutotuneError: no candidate runs; one line per candidate says why.
        """
        inv = bind_abstract(inv)
        kernel = inv.kernel
        candidates = self._candidates(inv, configs)
        surroundings = Surroundings.capture(target_device().device)
        started = time.monotonic()
        budget = env.autotune_budget_s() if self.policy.budget_s is None else self.policy.budget_s
        reporter = Reporter(kernel.name, inv.key, len(candidates))
        run = _Run(self, inv, candidates, started + budget, reporter, surroundings)
        best, best_ms = outside_trace(run.go, surroundings)
        seconds = time.monotonic() - started
        reporter.finish(best, best_ms, seconds)
        trials = [run.trials[i] for i in sorted(run.trials)]
        return AutotuneResult(kernel, inv.key, best, best_ms, trials, seconds, run.backward)

    def _candidates(self, inv: Invocation, configs: Sequence[Any] | None) -> list[Any]:
        """The heuristic config first, then the others without repeats."""
        kernel = inv.kernel
        given = list(kernel.config_space(inv) if configs is None else configs)
        found: list[Any] = []
        try:
            heuristic = kernel.heuristic_cfg(inv) if kernel.has_tunables else None
        except KernelNotSupported:
            raise
        except NotImplementedError:
            heuristic = None
        for cfg in ([] if heuristic is None else [heuristic]) + given:
            cfg = kernel.convert_config(cfg, inv)
            if cfg not in found:
                found.append(cfg)
        if not found:
            raise AutotuneError(f"key {inv.key!r}: kernel {kernel.name!r} has no candidates")
        return found


class _Run:
    """One tuning, in the worker thread."""

    def __init__(
        self,
        tuner: Autotuner,
        inv: Invocation,
        configs: list[Any],
        deadline: float,
        reporter: Reporter,
        surroundings: Surroundings,
    ):
        self.tuner = tuner
        self.inv = inv
        self.configs = configs
        self.deadline = deadline
        self.reporter = reporter
        self.surroundings = surroundings
        self.trials: dict[int, Trial] = {}
        self.backward = False
        self.sound: list[Candidate] = []

    def go(self) -> tuple[Any, float | None]:
        bench = Workbench(self.inv, self.configs, self.tuner.policy.validate_backward)
        workers = max(1, min(len(self.configs), os.cpu_count() or 1, 8))
        # The reference alone first, so that even the smallest budget yields a measurement.
        groups = [self.configs[:1]]
        rest = self.configs[1:]
        groups += [rest[i : i + workers] for i in range(0, len(rest), workers)]
        pool = ThreadPoolExecutor(workers, thread_name_prefix="ejkernel-compile")
        try:
            index = 0
            for group in groups:
                if self.sound and time.monotonic() > self.deadline:
                    self._skip(range(index, len(self.configs)), BUDGET_SPENT)
                    break
                self._group(bench, pool, group, index)
                index += len(group)
        finally:  # a compiler that takes longer than the budget is not waited for
            pool.shutdown(wait=False, cancel_futures=True)
        self.backward = bench.backward
        if not self.sound:
            raise AutotuneError(self._all_failed())
        self._warn_if_only_the_heuristic_ran()
        return self._winner(bench)

    def _group(
        self, bench: Workbench, pool: ThreadPoolExecutor, group: Sequence[Any], first: int
    ) -> None:
        """Compile side by side, then check one by one, then time in turns."""
        futures: list[Future[Candidate]] = [
            pool.submit(self.surroundings.run, bench.compile, cfg) for cfg in group
        ]
        ready: list[tuple[int, Candidate]] = []
        for index, (cfg, future) in enumerate(zip(group, futures, strict=True), first):
            try:
                left = max(self.deadline - time.monotonic(), 0.0) if self.sound else None
                candidate: Candidate = future.result(timeout=left)
                bench.check(candidate)
            except TimeoutError:
                self._trial(index, Trial(cfg, error=BUDGET_SPENT))
            except Exception as error:
                self._trial(index, Trial(cfg, error=f"{type(error).__name__}: {error}"))
            else:
                ready.append((index, candidate))
        measure = self.tuner.tuner.measure
        times = measure([c.forward for _, c in ready], self.deadline)
        totals: list[float | None] = [None] * len(ready)
        if bench.backward:
            totals = measure([c.both for _, c in ready if c.both], self.deadline)
        for (index, candidate), fwd, total in zip(ready, times, totals, strict=True):
            if fwd is None or (bench.backward and total is None):
                self._trial(index, Trial(candidate.cfg, error=BUDGET_SPENT))
                continue
            candidate.fwd_ms = fwd
            candidate.bwd_ms = None if total is None else max(total - fwd, 0.0)
            self.sound.append(candidate)
            ms = fwd if candidate.split or total is None else max(total, fwd)
            self._trial(index, Trial(candidate.cfg, ms, None, fwd, candidate.bwd_ms))

    def _winner(self, bench: Workbench) -> tuple[Any, float | None]:
        def total(c: Candidate) -> float:
            return c.fwd_ms + (c.bwd_ms or 0.0)

        best = min(self.sound, key=total)
        if not (bench.backward and best.split):
            best = min(self.sound, key=lambda c: c.fwd_ms if c.split else total(c))
            return best.cfg, best.fwd_ms if best.split else total(best)
        # Forward and backward tiles are chosen apart, inside one platform.
        kernel = self.inv.kernel
        platform = kernel.config_platform(best.cfg)
        same = [c for c in self.sound if kernel.config_platform(c.cfg) is platform and c.split]
        fastest = min(same, key=lambda c: c.fwd_ms)
        fastest_bwd = min(same, key=lambda c: c.bwd_ms or 0.0)
        try:
            cfg = dataclasses.replace(fastest.cfg, bwd_params=fastest_bwd.cfg.bwd_params)
            if all(cfg != c.cfg for c in same):
                bench.check(bench.compile(cfg))
        except Exception as error:
            self.reporter.note(f"best tiles do not go together: {first_line(str(error))}")
            return best.cfg, best.fwd_ms
        return cfg, fastest.fwd_ms

    def _trial(self, index: int, trial: Trial) -> None:
        self.trials[index] = trial
        self.reporter.candidate(trial.cfg, trial.ms, trial.error)
        if self.tuner.on_trial is not None:
            self.tuner.on_trial(trial, index, len(self.configs))

    def _skip(self, indices: Iterable[int], why: str) -> None:
        for index in indices:
            self._trial(index, Trial(self.configs[index], error=why))

    def _all_failed(self) -> str:
        lines = [f"{t.cfg!r}: {first_line(t.error)}" for _, t in sorted(self.trials.items())]
        return (
            f"autotuning kernel {self.inv.kernel.name!r}, key {self.inv.key!r}: every candidate "
            "failed:\n  " + "\n  ".join(lines)
        )

    def _warn_if_only_the_heuristic_ran(self) -> None:
        failed = [t for i, t in self.trials.items() if i and t.error and t.error != BUDGET_SPENT]
        if failed and len(failed) == len(self.configs) - 1:
            warn_once(
                ("autotune", self.inv.key),
                f"autotuning kernel {self.inv.kernel.name!r}: all {len(failed)} candidates "
                f"failed, the heuristic config is used: {first_line(failed[0].error)}",
            )


def autotune(
    kernel: Kernel[Any, Any],
    *args: Any,
    configs: Sequence[Any] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    validate_backward: bool | None = None,
    budget_s: float | None = None,
    **kwargs: Any,
) -> Any:
    """The fastest sound config for ``kernel(*args, **kwargs)``. Stores nothing.

    Args:
        kernel: the kernel.
        *args: positional arguments: arrays, tracers or ShapeDtypeStructs besides static values.
            Timing runs on synthetic inputs of the same shapes and dtypes.
        configs: candidates; None = ``kernel.config_space``. The heuristic config is always tried.
        num_warmup, num_iters: calls before and during the timing of each candidate.
        validate_backward: whether gradients must agree too; None = for kernels that have some.
        budget_s: seconds; None = ``EJKERNEL_AUTOTUNE_BUDGET_S``. When spent, the best so far wins.
        **kwargs: keyword arguments of the kernel, and ``platform``, ``mesh``, ``in_specs``,
            ``out_specs`` as for an executor.

    Raises:
        AutotuneError: every candidate failed.
    """
    policy = AutotunePolicy(True, num_warmup, num_iters, validate_backward, budget_s)
    return Autotuner(policy).tune(call_invocation(kernel, args, kwargs), configs).best


def autotune_recorded(
    invocations: Iterable[Invocation], *, executor: Executor | None = None, **options: Any
) -> list[AutotuneResult]:
    """Tune recorded invocations and store the winners in the executor's memory and disk tiers.

    Args:
        invocations: e.g. ``get_invocations()``.
        executor: whose tiers to fill; None = the default executor.
        **options: ``num_warmup``, ``num_iters``, ``validate_backward``, ``budget_s``.

    Returns:
        One result per invocation that has something to tune. A kernel whose candidates all fail
        is left out with a warning.
    """
    if executor is None:
        from ejkernel.ops.execution.default import get_default_executor

        executor = get_default_executor()
    try:
        tuner = Autotuner(AutotunePolicy(True, **options))
    except TypeError:
        legal = [f.name for f in dataclasses.fields(AutotunePolicy) if f.name != "autotune"]
        raise TypeError(
            f"autotune_recorded got {sorted(options)}, expected options among {legal}"
        ) from None
    results = []
    for inv in invocations:
        bound = bind_abstract(inv)
        if not bound.kernel.has_tunables:
            continue
        try:
            result = tuner.tune(bound)
        except (AutotuneError, ConfigError) as error:
            warn_once(("autotune", bound.key), str(error))
            continue
        chain = executor.selector
        if isinstance(chain, ConfigSelectorChain):
            chain.store(result.key, result.best, bound.info.get("payload"))
        results.append(result)
    return results
