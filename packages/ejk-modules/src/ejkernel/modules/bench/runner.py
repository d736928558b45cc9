"""Runs cases and turns times into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from ejkernel.modules.bench import record
from ejkernel.modules.bench.case import Case, forward_and_backward
from ejkernel.modules.bench.limits import Limits
from ejkernel.modules.bench.timing import Program, Timing, time_together

MODES = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Row:
    """One contender of one case.

    ``speed_over``: this one's speed over that of each of the others. ``tier``, ``implementation``
    and ``config`` say what automatic choice took. ``clock``: "host" or "device".
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

    def asdict(self) -> dict:
        return asdict(self)


def _compile(fn, args):
    compiled = jax.jit(fn).lower(*args).compile()
    stats = compiled.memory_analysis()
    temp = None if stats is None else getattr(stats, "temp_size_in_bytes", None)
    return compiled, None if temp is None else temp / 2**20


def _chosen(case: Case) -> dict[str, str]:
    """What the first contender runs, as far as it is a call of an operation."""
    if case.call is None:
        return {}
    from ejkernel.modules._executor import get_default_executor
    from ejkernel.modules._table import operation_class

    kernel = operation_class(case.call.operation).shared()
    try:
        found = get_default_executor().explanation(kernel, **case.call.abstract())
    except Exception as error:
        return {"tier": "error", "config": str(error)[:120]}
    return {
        "tier": found.tier,
        "implementation": found.implementation or "none",
        "config": record.config_text(found.cfg),
    }


def tier_of(case: Case) -> str:
    """Where the config comes from; to be asked before the first run, after which memory has it."""
    return _chosen(case).get("tier", "")


def run_case(
    case: Case,
    mode: str,
    limits: Limits,
    *,
    rounds: int = 9,
    target_s: float = 0.2,
    tier: str | None = None,
) -> list[Row]:
    """Time every contender of a case; one that fails becomes a row that says why.

    ``tier``: of the first contender's config, where it is known; None = asked now.
    """
    if tier is None:
        tier = tier_of(case)
    args = case.inputs()
    calls: dict[str, Callable[[], Any]] = {}
    temps, failed = {}, {}
    for name, fn in case.contenders.items():
        if isinstance(fn, str):
            failed[name] = fn
            continue
        body = forward_and_backward(fn, case.grad_argnums) if mode == "fwd+bwd" else fn
        try:
            compiled, temps[name] = _compile(body, args)
            jax.block_until_ready(compiled(*args))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            continue
        calls[name] = Program(compiled, args)
    times = time_together(calls, rounds=rounds, target_s=target_s) if calls else {}
    chosen = {**_chosen(case), "tier": tier}
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


def steps(cases: Iterable[Case], modes: Sequence[str]) -> list[tuple[Case, str]]:
    """The runs to make: a case without gradients has no backward pass."""
    return [(c, m) for c in cases for m in modes if m != "fwd+bwd" or c.grad_argnums]


def run_cases(
    cases: Iterable[Case],
    modes: Sequence[str],
    limits: Limits,
    *,
    on_row: Callable[[Row], None] = lambda row: None,
    **options: Any,
) -> Iterator[Row]:
    """The rows of all cases in all modes, one after the other; ``on_row`` hears of each."""
    tiers: dict[int, str] = {}
    for case, mode in steps(cases, modes):
        if id(case) not in tiers:
            tiers[id(case)] = tier_of(case)
        tier = tiers[id(case)]
        for row in run_case(case, mode, limits, tier=tier, **options):
            on_row(row)
            yield row
