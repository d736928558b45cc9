"""Timing and compiling ahead for the scripts beside this file."""

from __future__ import annotations

import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def use_checkout() -> None:
    """Import the packages of this checkout when they are not installed."""
    for source in sorted(ROOT.glob("packages/*/src")):
        sys.path.insert(0, str(source))
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(ROOT / "tools"))


use_checkout()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402, F401

from ejktest.ahead import in_parallel  # noqa: E402
from ejktest.attention_at_size import relative  # noqa: E402, F401


def milliseconds(fn, *args, seconds: float = 0.15) -> float:
    """Median over rounds of the mean time of back-to-back calls."""
    jax.block_until_ready(fn(*args))
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    once = max(time.perf_counter() - start, 1e-5)
    calls = max(2, min(50, int(seconds / 5 / once)))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            out = fn(*args)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(rounds)


def base_of(problem, lse):
    """lse ``[b, h, q]`` as the forward kernels give it to the backward kernels."""
    from ejkernel.kernels.triton.flash_attention.terms import logit_shift, logit_unit
    from ejkernel.types.problem import LOG2E

    fused = problem.soft_cap is not None
    return lse * LOG2E - logit_shift(problem) if fused else lse / logit_unit(problem)


def _compile(job):
    """In a worker: compile one plan into the disk cache; returns its error or None."""
    plan, avals, target = job
    from ejkernel.kernels.triton.bridge import describe
    from ejkernel.kernels.triton.compiled import compile_kernel

    try:
        compile_kernel(describe(plan.launch(target), avals, plan.outputs()), target)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[-1][:120]}"
    return None


def precompile(jobs) -> list[str | None]:
    """Compile (plan, avals, target) triples in parallel processes into the disk cache."""
    return in_parallel((_compile, job) for job in jobs)
