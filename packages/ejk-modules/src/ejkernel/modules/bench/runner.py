"""Runs cases and turns times into rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from ejkernel.modules.bench import record
from ejkernel.modules.bench.case import Case, forward_and_backward
from ejkernel.modules.bench.limits import Limits
from ejkernel.modules.bench.timing import Program, Timing, time_together
from ejkernel.ops.execution.progress import first_line

MODES = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Row:
    """One contender of one case.

    ``speed_over``: its speed relative to each other contender. ``tier``, ``implementation`` and
    ``config``: the automatic choice. ``clock``: "host" or "device".
    """

    case: str
    mode: str
    contender: str
    ms: float | None
    spread_ms: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    percent_of_limit: float | None = None
    speed_over: dict[str, float] = field(default_factory=dict)
    temp_mb: float | None = None
    note: str = ""
    bound: str = ""
    clock: str = "host"
    tier: str = ""
    implementation: str = ""
    config: str = ""


MOST_COMPILERS = 16
Compiled = tuple[Any, float | None] | str
"""A program and the MB it holds while it runs, or why there is none."""


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(str(error))[:120]}"


def _lower(case: Case, mode: str, fn: Callable, args: tuple) -> Any:
    """Returns the lowered program, or as a string why there is none."""
    body = forward_and_backward(fn, case.grad_argnums) if mode == "fwd+bwd" else fn
    try:
        return jax.jit(body, donate_argnums=tuple(_updates(case, mode))).lower(*args)
    except Exception as error:
        return _describe_error(error)


def _updates(case: Case, mode: str) -> Mapping[int, int]:
    return case.updates if mode == "fwd" else {}


def _compile(lowered: Any) -> Compiled:
    if isinstance(lowered, str):
        return lowered
    try:
        compiled = lowered.compile()
    except Exception as error:
        return _describe_error(error)
    stats = compiled.memory_analysis()
    temp = None if stats is None else getattr(stats, "temp_size_in_bytes", None)
    return compiled, None if temp is None else temp / 2**20


def compile_ahead(pairs: Sequence[tuple[Case, str]]) -> list[dict[str, Compiled]]:
    """Compiles every contender of every (case, mode) in parallel; runs none."""
    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, MOST_COMPILERS))) as pool:
        compiling = []
        for case, mode in pairs:
            args = _abstract_inputs(case)
            compiling.append({  # tracing takes turns anyway, so it happens here
                name: pool.submit(_compile, _lower(case, mode, fn, args))
                for name, fn in case.contenders.items()
                if not isinstance(fn, str)
            })  # fmt: skip
        return [{name: f.result() for name, f in futures.items()} for futures in compiling]


def _abstract_inputs(case: Case) -> tuple:
    """Returns the arrays of a case by shape and dtype, in the order of its inputs."""
    if case.call is None:
        return case.inputs()
    structs = case.call.abstract()
    return tuple(structs[name] for name in case.call.names)


def _explain_choice(case: Case) -> dict[str, str]:
    """Returns the choice for the first contender, if it is a call of an operation."""
    if case.call is None:
        return {}
    try:
        explanation = case.call.explanation()
    except Exception as error:
        return {"tier": "error", "config": str(error)[:120]}
    return {
        "tier": explanation.tier,
        "implementation": explanation.implementation or "none",
        "config": record.config_text(explanation.cfg),
    }


def find_tier(case: Case) -> str:
    """Returns the tier of the config; to be called before the first run, which caches it."""
    return _explain_choice(case).get("tier", "")


def run_case(
    case: Case,
    mode: str,
    limits: Limits,
    *,
    rounds: int = 9,
    target_s: float = 0.2,
    tier: str | None = None,
    programs: Mapping[str, Compiled] | None = None,
) -> list[Row]:
    """Times every contender of a case; one that fails becomes a row that says why.

    ``tier``: of the first contender's config; None = looked up now. ``programs``: the programs of
    ``compile_ahead``; None = compiled now.
    """
    if tier is None:
        tier = find_tier(case)
    if programs is None:
        (programs,) = compile_ahead([(case, mode)])
    args = case.inputs()
    calls: dict[str, Callable[[], Any]] = {}
    temps, failed = {}, {}
    for name, fn in case.contenders.items():
        made = fn if isinstance(fn, str) else programs[name]
        if isinstance(made, str):
            failed[name] = made
            continue
        compiled, temps[name] = made
        try:
            program = Program(compiled, args, _updates(case, mode))
            jax.block_until_ready(program())
        except Exception as error:
            failed[name] = _describe_error(error)
            continue
        calls[name] = program
    times = time_together(calls, rounds=rounds, target_s=target_s) if calls else {}
    chosen = {**_explain_choice(case), "tier": tier}
    first = next(iter(case.contenders))
    rows = []
    for name in case.contenders:
        if name in failed:
            rows.append(Row(case.name, mode, name, None, note=failed[name]))
            continue
        others = {n: t.median / times[name].median for n, t in times.items() if n != name}
        rows.append(
            _row(case, mode, name, times[name], others, temps[name], limits,
                 chosen if name == first else {})
        )  # fmt: skip
    return rows


def _row(
    case: Case,
    mode: str,
    name: str,
    t: Timing,
    speed_over: dict[str, float],
    temp_mb: float | None,
    limits: Limits,
    chosen: dict[str, str],
) -> Row:
    factor = 1.0 + case.backward_factor if mode == "fwd+bwd" else 1.0
    flops, moved = case.flops * factor, case.moved * factor
    least = limits.seconds(flops, moved, case.dtype)
    return Row(
        case.name, mode, name, t.median * 1e3, t.spread * 1e3,
        flops / t.median / 1e12, moved / t.median / 1e9, 100 * least / t.median,
        speed_over, temp_mb, case.notes, limits.bound(flops, moved, case.dtype), t.clock, **chosen,
    )  # fmt: skip


def select_runs(cases: Iterable[Case], modes: Sequence[str]) -> list[tuple[Case, str]]:
    """Returns (case, mode) pairs to time: a case without gradients has no backward pass."""
    return [(c, m) for c in cases for m in modes if m != "fwd+bwd" or c.grad_argnums]


def run_cases(
    cases: Iterable[Case], modes: Sequence[str], limits: Limits, **options: Any
) -> Iterator[Row]:
    """Yields the rows of all cases in all modes, one after the other.

    On a GPU everything is compiled before anything is timed, unless tracing would tune.
    """
    cases = list(cases)
    pairs = select_runs(cases, modes)
    tiers = {id(case): find_tier(case) for case in cases}
    ahead = jax.default_backend() == "gpu" and "autotune" not in tiers.values()
    made = compile_ahead(pairs) if ahead else [None] * len(pairs)
    for (case, mode), programs in zip(pairs, made, strict=True):
        tier = tiers[id(case)]
        yield from run_case(case, mode, limits, tier=tier, programs=programs, **options)
