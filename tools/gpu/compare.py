"""Time one operation of this checkout and of another on this device, one after the other.

    python tools/gpu/compare.py OLD flash_attention          # OLD holds packages/*/src
    python tools/gpu/compare.py OLD page_attention --cases 'decode-b64-*' --platform triton

Cases are those that ``ejk shapes OPERATION`` lists for this device. One process for each set of
sources compiles all calls, then they alternate: a case in one, the same case in the other, three
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

Pairs = list[tuple[str, str]]  # case, mode
SPAWN = multiprocessing.get_context("spawn")  # the parent's sources are not the worker's


def serve_times(
    requests: Connection, root: Path, operation: str, platform: str | None, pairs: Pairs
) -> None:
    """Compiles ``pairs`` from the sources in ``root``, then answers each ``case, mode``."""
    checkout.use(root)
    import jax

    from ejkernel.modules.bench.case import forward_and_backward, ours
    from ejkernel.modules.workloads import call_of
    from ejkernel.modules.workloads.find import shapes_of

    checkout.register(root)
    shapes = {s.name: s for s in shapes_of(operation)}
    calls = {case: call_of(shapes[case], operation) for case, _ in pairs if case in shapes}

    def compile_run(case: str, mode: str) -> Any:
        call = calls[case]
        f = ours(call, platform)
        if mode == "fwd+bwd":
            f = forward_and_backward(f, tuple(call.names.index(n) for n in call.gradients))
        return jax.jit(f).lower(*(call.abstract()[name] for name in call.names)).compile()

    def print_error(case: str, mode: str, error: BaseException) -> None:
        print(f"{case} {mode}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        programs = {run: pool.submit(compile_run, *run) for run in pairs}
        for run, program in programs.items():
            if error := program.exception():
                print_error(*run, error)
    requests.send("ready")
    loaded, arrays = "", ()
    with contextlib.suppress(EOFError):
        while True:
            case, mode = requests.recv()
            ms = None
            try:
                program = programs[case, mode].result()
                if case != loaded:
                    arrays = ()
                    arrays = jax.block_until_ready(tuple(calls[case].make().values()))
                    loaded = case
                ms = milliseconds(program, arrays)
            except Exception as error:
                print_error(case, mode, error)
            requests.send(ms)


def serve_logged(log: Path | None, *arguments: Any) -> None:
    """Runs ``serve_times`` and writes to ``log`` what this process and compilers print."""
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(descriptor, stream.fileno())
    serve_times(*arguments)


def milliseconds(program: Any, arrays: tuple[Any, ...]) -> float:
    """Returns the median of three rounds of back-to-back calls."""
    from ejkernel.ops.execution.timing import QueueClock

    def time_calls(count: int) -> float:
        return QueueClock().seconds(lambda: program(*arrays), count) * 1e3

    time_calls(1)
    count = max(2, min(60, int(60 / max(time_calls(1), 1e-2))))
    return statistics.median(time_calls(count) for _ in range(3))


def start_worker(root: Path, log: Path | None, *arguments: Any) -> Connection:
    """Starts a worker on the sources under ``root`` and returns the connection to it."""
    if not any(root.glob("packages/*/src")):
        sys.exit(f"{root}: no packages/*/src there")
    ours, theirs = SPAWN.Pipe()
    SPAWN.Process(target=serve_logged, args=(log, theirs, root, *arguments), daemon=True).start()
    theirs.close()
    return ours


def answer(worker: Connection, *run: Any) -> Any:
    """Returns a worker's answer to a run, or the first thing that it sends."""
    try:
        if run:
            worker.send(run)
        return worker.recv()
    except (EOFError, OSError):
        sys.exit("a worker ended early: see what it printed, or --logs")


def list_pairs(operation: str, globs: str) -> Pairs:
    """Returns the cases for this device, each with its modes, as this checkout lists them."""
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
    args = parser.parse_args(argv)
    # in a process of its own: the workers have the device to themselves
    with concurrent.futures.ProcessPoolExecutor(1, SPAWN) as pool:
        pairs = pool.submit(list_pairs, args.operation, args.cases).result()
    if not pairs:
        print(f"no case of {args.operation} matches {args.cases!r}", file=sys.stderr)
        return 2
    os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    began, workers = time.time(), {}
    for label, root in (("old", args.old.resolve()), ("new", checkout.ROOT)):
        log = args.logs / f"{label}.txt" if args.logs else None
        workers[label] = start_worker(root, log, args.operation, args.platform, pairs)
    for worker in workers.values():
        answer(worker)
    print(f"compiled in {time.time() - began:.0f}s", flush=True)
    times: dict[tuple[str, tuple[str, str]], list[float]] = {}
    for index in range(args.rounds):
        for run in pairs:
            for label in ("old", "new") if index % 2 == 0 else ("new", "old"):
                ms = answer(workers[label], *run)
                if ms is not None:
                    times.setdefault((label, run), []).append(ms)
        print(f"round {index + 1} after {time.time() - began:.0f}s", flush=True)
    print(f"\n{'case':45s} {'old ms':>8s} {'new ms':>8s} {'old/new':>8s}  by rounds")
    for run in pairs:
        name, (old, new) = " ".join(run), (times.get((x, run), []) for x in ("old", "new"))
        if not old or not new:
            print(f"{name:45s} {'ran' if old else '-':>8s} {'ran' if new else '-':>8s}")
            continue
        a, b = statistics.median(old), statistics.median(new)
        ratios = " ".join(f"{x / y:.3f}" for x, y in zip(old, new, strict=False))
        print(f"{name:45s} {a:8.3f} {b:8.3f} {a / b:8.3f}  {ratios}")
    return 0 if len(times) == 2 * len(pairs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
