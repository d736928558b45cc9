"""Explicit tuning: of a call, of recorded calls; winners are stored."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ejkernel.ops import registry
from ejkernel.ops.config.choice import AutotunePolicy, Choice
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.invocation import BoundCall, Invocation, KernelOf, call_invocation
from ejkernel.ops.core.types import Cfg
from ejkernel.ops.errors import AutotuneError, ConfigError, warn_once
from ejkernel.ops.execution import multihost
from ejkernel.ops.execution.autotuner import Autotuner, OnTrial, TuningInterrupted
from ejkernel.ops.execution.executor import Executor, get_default_executor
from ejkernel.ops.execution.timing import benchmark, check_counts, compare_programs
from ejkernel.ops.execution.trials import BUDGET_SPENT, AutotuneResult, Trial

__all__ = [
    "BUDGET_SPENT",
    "AutotuneResult",
    "Autotuner",
    "Trial",
    "Tuner",
    "TuningInterrupted",
    "autotune",
    "autotune_recorded",
    "benchmark",
    "tune",
]


@dataclasses.dataclass(frozen=True)
class Tuner:
    """Ranks functions by time: warm-up, then successive halving.

    Args:
        num_warmup: calls of each function before timing.
        num_iters: samples of the fastest functions.
    """

    num_warmup: int = 3
    num_iters: int = 10

    def __post_init__(self) -> None:
        check_counts(self.num_warmup, self.num_iters)

    def measure(
        self, fns: Sequence[Callable[[], Any]], deadline: float | None = None
    ) -> list[float | None]:
        """Returns the median milliseconds per function; None if not reached before ``deadline``."""
        timed = compare_programs(
            fns, num_warmup=self.num_warmup, num_iters=self.num_iters, deadline=deadline
        )
        return [None if t is None else t.ms for t in timed]


def autotune(
    kernel: KernelOf[Cfg],
    *args: Any,
    configs: Sequence[Any] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    validate_backward: bool | None = None,
    budget_s: float | None = None,
    **kwargs: Any,
) -> Cfg:
    """Returns the fastest valid config for ``kernel(*args, **kwargs)``. Stores nothing.

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
    configs = None if configs is None else list(configs)
    call = call_invocation(kernel, args, kwargs).bound
    return _tuned_together(
        call, ["autotune", repr(configs)], lambda: Autotuner(policy).tune(call, configs)
    ).best


def _tuned_together(
    call: BoundCall, topic: Any, tune: Callable[[], AutotuneResult]
) -> AutotuneResult:
    """``tune()``; in a job of several processes process 0 does it for all."""
    group = multihost.peers()
    if group is None:
        return tune()
    mine: list[AutotuneResult] = []

    def decide() -> Choice:
        mine.append(tune())
        return Choice(mine[0].best, "autotune", call.key)

    choice = group.agree(call, topic, decide)
    return mine[0] if mine else AutotuneResult(call.kernel, call.key, choice.cfg, None)


def autotune_recorded(
    invocations: Iterable[Invocation],
    *,
    executor: Executor | None = None,
    total_s: float | None = None,
    on_trial: OnTrial | None = None,
    on_result: Callable[[AutotuneResult], None] | None = None,
    **options: Any,
) -> list[AutotuneResult]:
    """Tune recorded invocations and store the winners in the executor's memory and disk tiers.

    In a job of several processes each call is tuned by process 0, and all store its winner.

    Args:
        invocations: e.g. ``get_invocations()``, ``load_invocations(path)`` or
            ``invocations_in_lowered(lowered)``.
        executor: whose tiers to fill; None = the default executor.
        total_s: seconds for all of them; calls not begun by then are left out. None = no bound.
        on_trial: called with each finished trial, its index and the number of candidates.
        on_result: called with each result once it is stored.
        **options: ``num_warmup``, ``num_iters``, ``validate_backward``, ``budget_s`` (per call),
            ``max_candidates``.

    Returns:
        One result per invocation of a kernel with tunables; where there is a single candidate it
        is the best, untimed (``best_ms`` None) and not stored. A winner that was compared with
        nobody (``compared``) is kept for this process and not on disk. A kernel whose candidates
        all fail is left out with a warning.

    Raises:
        TuningInterrupted: Ctrl-C; what was finished is stored and in ``results``.
    """
    executor = get_default_executor() if executor is None else executor
    try:
        policy = AutotunePolicy(True, **options)
    except TypeError:
        legal = [f.name for f in dataclasses.fields(AutotunePolicy) if f.name != "autotune"]
        raise TypeError(
            f"autotune_recorded got {sorted(options)}, expected options among {legal}"
        ) from None
    chain = executor.selector if isinstance(executor.selector, ConfigSelectorChain) else None
    tuner = Autotuner(policy, on_trial, None if chain is None else chain.failures)
    end = None if total_s is None else time.monotonic() + total_s
    results: list[AutotuneResult] = []
    for inv in invocations:
        if end is not None and time.monotonic() >= end:
            break
        try:
            result = _tune_recorded(tuner, chain, inv)
        except TuningInterrupted as stop:
            stop.results = results
            raise
        if result is not None:
            results.append(result)
            if on_result is not None:
                on_result(result)
    return results


def tune(
    function: Callable[..., Any],
    *args: Any,
    executor: Executor | None = None,
    total_s: float | None = None,
    on_trial: OnTrial | None = None,
    on_result: Callable[[AutotuneResult], None] | None = None,
    **options: Any,
) -> list[AutotuneResult]:
    """Tunes every call that ``function(*args)`` makes, and stores the winners.

    The function is traced, not run: its calls are found in the functions that it calls, in
    gradients, in bodies of ``scan`` and in functions under ``jax.jit``. As functions that JAX has
    traced before would hide their calls, and hold configs from before afterwards, JAX's caches of
    traced and compiled functions are cleared (``jax.clear_caches``) before and after. A call that
    is tuned already is tuned again.

    Args:
        function: a training step, say; also one under ``jax.jit``.
        *args: its arguments: pytrees of arrays or ShapeDtypeStructs.
        executor: whose tiers to fill; None = the default executor.
        total_s: seconds for all calls; those not begun by then are left out. None = no bound.
        on_trial, on_result: as in :func:`autotune_recorded`.
        **options: as in :func:`autotune_recorded`.

    Returns:
        One result per call with tunables, in the order of the trace.

    Raises:
        ValueError: the function makes no call.
        TuningInterrupted: Ctrl-C; what was finished is stored and in ``results``.
    """
    jax.clear_caches()
    try:
        with registry.collect_invocations() as calls:
            jax.eval_shape(function, *args)
        if not calls:
            name = getattr(function, "__name__", repr(function))
            raise ValueError(f"function: {name} makes no call of a kernel, nothing can be tuned")
        return autotune_recorded(
            calls.values(),
            executor=executor,
            total_s=total_s,
            on_trial=on_trial,
            on_result=on_result,
            **options,
        )
    finally:
        jax.clear_caches()


def _tune_recorded(
    tuner: Autotuner, chain: ConfigSelectorChain | None, inv: Invocation
) -> AutotuneResult | None:
    call = inv.bound
    if not call.kernel.has_tunables:
        return None
    try:
        configs = tuner.candidates(call)
        if len(configs) < 2:
            return AutotuneResult(call.kernel, call.key, configs[0], None, [Trial(configs[0])])
        result = _tuned_together(call, "recorded", lambda: tuner.tune(call))
    except (AutotuneError, ConfigError) as error:
        warn_once(("autotune", call.key), str(error))
        return None
    if chain is not None:
        chain.store_result(result, call.payload)
    return result
