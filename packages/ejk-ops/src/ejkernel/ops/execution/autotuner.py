"""Autotuner: the fastest valid config of one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from ejkernel.ops import env
from ejkernel.ops.config.choice import AutotunePolicy
from ejkernel.ops.config.failures import FailureCache
from ejkernel.ops.core.invocation import AnyKernel, BoundCall, Invocation
from ejkernel.ops.errors import AutotuneError, KernelNotSupported
from ejkernel.ops.execution.isolation import Surroundings, outside_trace
from ejkernel.ops.execution.progress import Reporter
from ejkernel.ops.execution.search import DeviceLock, Search
from ejkernel.ops.execution.timing import check_counts
from ejkernel.ops.execution.trials import AutotuneResult, Trial
from ejkernel.ops.utils.copying import Copyable
from ejkernel.ops.utils.device import target_device
from ejkernel.ops.utils.serialization import to_plain

# After Ctrl-C: time for the program that is running on the device to end.
GRACE_S = 10.0

OnTrial = Callable[[Trial, int, int], None]
Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C during tuning.

    Attributes:
        results: what was finished and stored before.
        partial: the outcome of the key under way, not stored; None when nothing was measured.
    """

    def __init__(self, partial: AutotuneResult | None = None):
        super().__init__("tuning was interrupted")
        self.partial = partial
        self.results: list[AutotuneResult] = []


class Autotuner(Copyable, process_local={"_running": set}):
    """Finds the fastest valid config of a call. Stores nothing but failures.

    The heuristic config is candidate 0 and the numeric reference; if it fails, the first
    candidate that runs is. Works inside a trace: everything happens in another thread, on inputs
    made by ``kernel.sample_inputs``.

    Args:
        policy: counts, budget and validation of gradients.
        on_trial: called with each finished trial, its index and the number of candidates.
        failures: remembers candidates that fail, which are then not tried again; None = nothing.
        device_lock: a lock that searches of several threads share: they compile in parallel and use
            the device one after the other; None = there is one search at a time.
        prune: returns why a config of a call is not worth compiling, None when it is; not called
            for the first config.
        implicit: whether a call triggered this search on its own: a line on stderr then says why
            the call waits, when the search takes more than two seconds.
    """

    def __init__(
        self,
        policy: AutotunePolicy | None = None,
        on_trial: OnTrial | None = None,
        failures: FailureCache | None = None,
        *,
        device_lock: DeviceLock | None = None,
        prune: Callable[[Invocation, Any], str | None] | None = None,
        implicit: bool = False,
    ):
        self.policy = AutotunePolicy() if policy is None else policy
        check_counts(self.policy.num_warmup, self.policy.num_iters)
        self.on_trial = on_trial
        self.failures = failures
        self.device_lock = device_lock
        self.prune = prune
        self.implicit = implicit
        self._running: set[Search] = set()

    def stop(self) -> None:
        """Let the calls that other threads are tuning end soon, with what was measured so far."""
        for search in tuple(self._running):
            search.stop()

    def tune(
        self,
        inv: Invocation,
        configs: Sequence[Any] | None = None,
        *,
        inputs: Inputs | Callable[[], Inputs] | None = None,
    ) -> AutotuneResult:
        """Tune one call.

        Args:
            inv: the call; its arrays may be abstract or tracers.
            configs: candidates, all of them tried; None = the ``policy.max_candidates`` best of
                ``kernel.config_space(inv)``.
            inputs: ``(args, kwargs)`` of the same call with concrete arrays to run on, or a
                function that makes them; None = made up by ``kernel.sample_inputs``. Not for
                calls over a mesh.

        Raises:
            AutotuneError: no candidate runs; one line per candidate says why.
            TuningInterrupted: Ctrl-C; carries what was measured.
        """
        call, kernel = inv.bound, inv.kernel
        candidates = self.candidates(call, configs)
        reporter = Reporter(kernel.name, call.key, len(candidates))

        def report(trial: Trial, index: int) -> None:
            reporter.candidate(trial.cfg, trial.ms, trial.error)
            if self.on_trial is not None:  # joined tiles come after all others
                self.on_trial(trial, index, max(len(candidates), index + 1))

        search = Search(
            call,
            candidates,
            self.policy,
            env.autotune_budget_s() if self.policy.budget_s is None else self.policy.budget_s,
            Surroundings.capture(target_device().device),
            report,
            self.failures,
            reporter.note,
            None if inputs is None else functools.partial(_bind_inputs, kernel, inputs),
            self.device_lock,
            self._prune_reasons(call, candidates),
        )
        self._running.add(search)
        announcement = reporter.announced(search.budget_s) if self.implicit else nullcontext()
        try:
            with announcement:
                outside_trace(search.find_best, search.surroundings, search.stop, GRACE_S)
        except KeyboardInterrupt:
            partial = None if search.best is None else search.result(interrupted=True)
            raise TuningInterrupted(partial) from None
        finally:
            self._running.discard(search)
        result = search.result(interrupted=search.stopped.is_set())
        reporter.finish(result.best, result.best_ms, result.seconds)
        return result

    def _prune_reasons(self, call: BoundCall, candidates: Sequence[Any]) -> dict[int, str]:
        if self.prune is None:
            return {}
        reasons = {i: self.prune(call, cfg) for i, cfg in enumerate(candidates) if i}
        return {i: reason for i, reason in reasons.items() if reason is not None}

    def candidates(self, call: BoundCall, configs: Sequence[Any] | None = None) -> list[Any]:
        """Returns the candidates of ``tune``: the heuristic config, then the others, each once."""
        kernel = call.kernel
        candidates: list[Any] = []
        try:
            heuristic = kernel.heuristic_cfg(call) if kernel.has_tunables else None
        except KernelNotSupported:
            raise
        except NotImplementedError:
            heuristic = None
        proposed = list(kernel.config_space(call) if configs is None else configs)
        for cfg in ([] if heuristic is None else [heuristic]) + proposed:
            cfg = kernel.convert_config(cfg, call)
            if cfg not in candidates:
                candidates.append(cfg)
        if not candidates:
            raise AutotuneError(f"key {call.key!r}: kernel {kernel.name!r} has no candidates")
        if configs is not None:
            return candidates
        return shortlist(kernel, candidates, self.policy.max_candidates)


def _bind_inputs(
    kernel: AnyKernel, inputs: Inputs | Callable[[], Inputs]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as implementations receive them."""
    args, kwargs = inputs if isinstance(inputs, tuple) else inputs()
    return kernel.bind(*kernel.prepare(tuple(args), dict(kwargs)))


def shortlist(kernel: AnyKernel, configs: Sequence[Any], limit: int) -> list[Any]:
    """At most ``limit`` of the configs, in their order; the first one is always kept.

    Implementations leave out configs that their arithmetic on registers, shared memory and waves
    rules out, and list their heuristic config first. The others are ranked by their distance from
    it in steps, and platforms alternate, so that a long list of one does not displace another.
    """
    if len(configs) <= limit:
        return list(configs)
    queues: dict[Any, list[int]] = {}
    for index, cfg in enumerate(configs):
        queues.setdefault(kernel.config_platform(cfg), []).append(index)
    for queue in queues.values():
        first = _plain(configs[queue[0]])
        queue.sort(key=lambda index: _count_steps(_plain(configs[index]), first))
    chosen: list[int] = []
    for turn in range(max(map(len, queues.values()))):
        chosen += [queue[turn] for queue in queues.values() if turn < len(queue)]
    return [configs[index] for index in sorted(chosen[: max(limit, 1)])]


def _plain(cfg: Any) -> Any:
    try:
        return to_plain(cfg)
    except TypeError:
        return None


def _count_steps(a: Any, b: Any) -> float:
    """Returns the doublings between two configs; a field that only one sets is half a doubling."""
    if isinstance(a, dict) and isinstance(b, dict):
        return sum(_count_steps(a.get(k), b.get(k)) for k in {**a, **b})
    if a == b:
        return 0.0
    if a is None or b is None:
        return 0.5
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return abs(math.log2(a / b)) if numbers and a > 0 and b > 0 else 1.0
