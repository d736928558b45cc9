"""One operation of this checkout beside that of another, on this device, by turns.

    python tools/gpu/compare.py OLD flash_attention          # OLD holds packages/*/src
    python tools/gpu/compare.py OLD page_attention --cases 'decode-b64-*' --platform triton

Cases are those of the benchmark (``python -m bench OPERATION --list``). One process for each set of
sources compiles all calls, then they take turns: a case in one, the same case in the other, three
rounds in changing order. Prints milliseconds (medians) and old over new: above 1, new is faster.
``--logs DIR`` keeps what the compilers say of registers and spills.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the worker's sources come first

import checkout

Wanted = list[tuple[str, str]]  # case, mode
START = multiprocessing.get_context("spawn")  # the parent's sources are not the worker's


def worker(
    asks: Connection, root: Path, operation: str, platform: str | None, wanted: Wanted
) -> None:
    """Compiles ``wanted`` from the sources in ``root``, then answers each ``case, mode``."""
    checkout.use(root)
    import jax

    from ejkernel.modules.bench.case import forward_and_backward, ours
    from ejkernel.modules.workloads import call_of
    from ejkernel.modules.workloads.find import shapes_of

    checkout.register(root)
    shapes = {s.name: s for s in shapes_of(operation)}
    calls = {case: call_of(shapes[case], operation) for case, _ in wanted if case in shapes}

    def compiled(case: str, mode: str) -> Any:
        call = calls[case]
        f = ours(call, platform)
        if mode == "fwd+bwd":
            f = forward_and_backward(f, tuple(call.names.index(n) for n in call.gradients))
        return jax.jit(f).lower(*(call.abstract()[name] for name in call.names)).compile()

    def told(case: str, mode: str, error: Exception) -> None:
        print(f"{case} {mode}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        programs = {(case, mode): pool.submit(compiled, case, mode) for case, mode in wanted}
        for key, found in programs.items():
            if error := found.exception():
                told(*key, error)
    asks.send("ready")
    held, given = "", ()
    with contextlib.suppress(EOFError):
        while True:
            case, mode = asks.recv()
            answer = None
            try:
                program = programs[case, mode].result()
                if case != held:
                    given = ()
                    given, held = jax.block_until_ready(tuple(calls[case].make().values())), case
                answer = milliseconds(program, given)
            except Exception as error:
                told(case, mode, error)
            asks.send(answer)


def logged(log: Path | None, *given: Any) -> None:
    """A worker in a process of its own, which writes to ``log`` what it and compilers print."""
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(descriptor, stream.fileno())
    worker(*given)


def milliseconds(program: Any, given: tuple[Any, ...]) -> float:
    """Median of three runs of back-to-back calls."""
    from ejkernel.ops.execution.timing import QueueClock

    def run(calls: int) -> float:
        return QueueClock().seconds(lambda: program(*given), calls) * 1e3

    run(1)
    calls = max(2, min(60, int(60 / max(run(1), 1e-2))))
    return statistics.median(run(calls) for _ in range(3))


def start(root: Path, log: Path | None, *given: Any) -> Connection:
    """A worker on the sources under ``root``: what it is asked by, and answers."""
    if not any(root.glob("packages/*/src")):
        sys.exit(f"{root}: no packages/*/src there")
    here, there = START.Pipe()
    START.Process(target=logged, args=(log, there, root, *given), daemon=True).start()
    there.close()
    return here


def answer(asks: Connection, *question: Any) -> Any:
    """What a worker says to a question, or first of all."""
    try:
        if question:
            asks.send(question)
        return asks.recv()
    except (EOFError, OSError):
        sys.exit("a worker ended early: see what it printed, or --logs")


def asked(operation: str, globs: str) -> Wanted:
    """Cases for this device, each with its modes, as this checkout lists them."""
    checkout.use()
    from ejkernel.modules.workloads.find import calls_here

    calls = calls_here(operation, globs)
    return [(c.name, m) for c in calls for m in ("fwd", "fwd+bwd") if c.gradients or m == "fwd"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("operation")
    parser.add_argument("--cases", default="*", help="comma-separated globs on case names")
    parser.add_argument("--platform", help="of both; default: what each chooses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args(argv)
    # in a process of its own: the workers have the device to themselves
    with concurrent.futures.ProcessPoolExecutor(1, START) as pool:
        wanted = pool.submit(asked, options.operation, options.cases).result()
    if not wanted:
        print(f"no case of {options.operation} matches {options.cases!r}", file=sys.stderr)
        return 2
    os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    began, pair = time.time(), {}
    for label, root in (("old", options.old.resolve()), ("new", checkout.ROOT)):
        log = options.logs / f"{label}.txt" if options.logs else None
        pair[label] = start(root, log, options.operation, options.platform, wanted)
    for asks in pair.values():
        answer(asks)
    print(f"compiled in {time.time() - began:.0f}s", flush=True)
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(options.rounds):
        for case, mode in wanted:
            for label in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                ms = answer(pair[label], case, mode)
                if ms is not None:
                    found.setdefault((f"{case} {mode}", label), []).append(ms)
        print(f"round {turn + 1} after {time.time() - began:.0f}s", flush=True)
    print(f"\n{'case':45s} {'old ms':>8s} {'new ms':>8s} {'old/new':>8s}  by rounds")
    for name in (f"{case} {mode}" for case, mode in wanted):
        old, new = found.get((name, "old"), []), found.get((name, "new"), [])
        if not old or not new:
            print(f"{name:45s} {'ran' if old else '-':>8s} {'ran' if new else '-':>8s}")
            continue
        a, b = statistics.median(old), statistics.median(new)
        each = " ".join(f"{x / y:.3f}" for x, y in zip(old, new, strict=False))
        print(f"{name:45s} {a:8.3f} {b:8.3f} {a / b:8.3f}  {each}")
    return 0 if len(found) == 2 * len(wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
