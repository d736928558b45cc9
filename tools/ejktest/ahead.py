"""Compiling in parallel processes without a GPU, before one process with a GPU needs the code."""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from ejkernel.kernels.triton.flash_attention.implementation import flash_attention
from ejkernel.kernels.triton.targets import Target, compile_for
from ejktest.at_size import inputs, kernel
from ejktest.attention import Call


def _guarded(job: tuple[Any, ...]) -> Any:
    try:
        return job[0](*job[1:])
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def as_finished(
    jobs: Iterable[tuple[Any, ...]], workers: int | None = None
) -> Iterator[tuple[int, Any]]:
    """(number, result) of (function, *arguments) tuples, each run in a process without the GPU.

    As they finish, ``workers`` at a time: by default one fewer than there are cores. A job that
    raises gives its error as a string: what it compiles is compiled again, and fails again, where
    it is used.
    """
    jobs = list(jobs)
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    workers = min(len(jobs), workers or max(1, (os.cpu_count() or 2) - 1))
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"  # for the workers; here the device is already chosen
    try:
        with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
            futures = {pool.submit(_guarded, job): number for number, job in enumerate(jobs)}
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield futures[future], future.result()
            finally:  # who stops early does not wait for what has not begun
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        os.environ.pop("JAX_PLATFORMS")
        if before is not None:
            os.environ["JAX_PLATFORMS"] = before


def in_parallel(jobs: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Returns the results of ``as_finished`` in the order of the jobs."""
    return [result for _, result in sorted(as_finished(jobs), key=lambda result: result[0])]


def compile_side_by_side(jobs: Iterable[tuple[Any, ...]]) -> None:
    """Jobs that compile into the disk cache, ``in_parallel``.

    Nothing in a worker of pytest-xdist: those run side by side already, and each would compile all.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        in_parallel(jobs)


def lower(f: Callable[..., Any], target: Target, *operands: Any) -> None:
    """Compile the Triton kernels of a jitted function into the disk cache."""
    with compile_for(target):
        f.trace(*operands).lower(lowering_platforms=(target.platform,))  # ty: ignore[missing-attribute]


def lower_case(call: Call, target: Target) -> None:
    """Compiles the kernels of a call of flash attention."""
    lower(kernel(call, flash_attention), target, *inputs(call))


def _lower_drawn(module: str, operation: str, name: Any, target: Target) -> None:
    cases = importlib.import_module(module)
    function = getattr(importlib.import_module("ejkernel.kernels.triton"), operation)
    lower(cases.runner(name, function), target, *jax.eval_shape(lambda: cases.draw(name)))


def compile_cases(cases: Any, operation: str, names: Iterable[Any], target: Target) -> None:
    """The Triton kernels of cases of a module that has ``runner`` and ``draw``, side by side."""
    jobs = ((_lower_drawn, cases.__name__, operation, name, target) for name in names)
    compile_side_by_side(jobs)
