"""Runs cases and turns times into rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import jax

from bench.case import Case, forward_and_backward
from bench.limits import Limits
from bench.timing import time_together


@dataclass(frozen=True)
class Row:
    """One contender of one case. ``ratio``: the first contender's speed over this one's peers."""

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

    def asdict(self) -> dict:
        return asdict(self)


def _compile(fn, args):
    compiled = jax.jit(fn).lower(*args).compile()
    stats = compiled.memory_analysis()
    temp = None if stats is None else getattr(stats, "temp_size_in_bytes", None)
    return compiled, None if temp is None else temp / 2**20


def run_case(case: Case, mode: str, limits: Limits, *, rounds: int, target_s: float) -> list[Row]:
    args = case.inputs()
    calls, temps, failed = {}, {}, {}
    for name, fn in case.contenders.items():
        if isinstance(fn, str):
            failed[name] = fn
            continue
        body = forward_and_backward(fn, case.grad_argnums) if mode == "fwd+bwd" else fn
        try:
            compiled, temps[name] = _compile(body, args)
            jax.block_until_ready(compiled(*args))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            continue
        calls[name] = lambda c=compiled: c(*args)
    times = time_together(calls, rounds=rounds, target_s=target_s) if calls else {}
    factor = 1.0 + case.backward_factor if mode == "fwd+bwd" else 1.0
    flops, moved = case.flops * factor, case.moved * factor
    rows = []
    for name in case.contenders:
        if name in failed:
            rows.append(Row(case.name, mode, name, None, note=failed[name]))
            continue
        t = times[name]
        least = limits.seconds(flops, moved, case.dtype)
        rows.append(
            Row(
                case.name, mode, name, t.median * 1e3, t.spread * 1e3,
                flops / t.median / 1e12, moved / t.median / 1e9, 100 * least / t.median,
                {n: times[n].median / t.median for n in times if n != name},
                temps[name], case.notes,
            )
        )  # fmt: skip
    return rows


def run_cases(
    cases: Iterable[Case], modes: Iterable[str], limits: Limits, **options
) -> Iterable[Row]:
    for case in cases:
        for mode in modes:
            if mode == "fwd+bwd" and not case.grad_argnums:
                continue
            for row in run_case(case, mode, limits, **options):
                print(f"{row.case} {row.mode} {row.contender}: {row.ms}", file=sys.stderr)
                yield row
