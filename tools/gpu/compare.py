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
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the worker's sources come first

import checkout

MARK = "@@"


def worker(root: Path, operation: str, platform: str | None, wanted: list[list[str]]) -> None:
    """Compiles ``wanted`` from the sources in ``root``, then answers each line ``case mode``."""
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
    print(MARK, json.dumps("ready"), flush=True)
    held, given = "", ()
    for line in sys.stdin:
        case, mode = line.split()
        answer = None
        try:
            program = programs[case, mode].result()
            if case != held:
                given = ()
                given, held = jax.block_until_ready(tuple(calls[case].make().values())), case
            answer = milliseconds(program, given)
        except Exception as error:
            told(case, mode, error)
        print(MARK, json.dumps(answer), flush=True)


def milliseconds(program: Any, given: tuple[Any, ...]) -> float:
    """Median of three runs of back-to-back calls."""
    import jax

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = program(*given)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls * 1e3

    run(1)
    calls = max(2, min(60, int(60 / max(run(1), 1e-2))))
    return statistics.median(run(calls) for _ in range(3))


class Process:
    """A worker on the sources under ``root``; what else it prints goes to ``log``."""

    def __init__(self, root: Path, wanted: list[str], log: Path | None) -> None:
        mine = sorted(map(str, root.glob("packages/*/src")))
        if not mine:
            sys.exit(f"{root}: no packages/*/src there")
        kept = [p for p in os.environ.get("PYTHONPATH", "").split(":") if "/packages/" not in p]
        env = os.environ | {"PYTHONPATH": ":".join([*mine, *kept])}
        env |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.log = open(log, "w") if log else None
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(root), *wanted],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            stderr=None if self.log is None else self.log,
        )  # fmt: skip
        self.answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Both workers compile at once: neither may wait for its output to be read."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line[len(MARK) :]))
            elif self.log:
                self.log.write(line)
        self.answers.put("ended")

    def answer(self) -> Any:
        answer = self.answers.get()
        if answer == "ended":
            sys.exit("a worker ended early: see what it printed, or --logs")
        return answer

    def ask(self, case: str, mode: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{case} {mode}\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def asked(operation: str, globs: str) -> list[list[str]]:
    """Cases for this device, each with its modes, as this checkout lists them."""
    checkout.use()
    from ejkernel.modules.workloads.find import calls_here

    calls = calls_here(operation, globs)
    return [[c.name, m] for c in calls for m in ("fwd", "fwd+bwd") if c.gradients or m == "fwd"]


def main(argv: list[str] | None = None) -> int:
    if sys.argv[1:2] == ["--worker"] and argv is None:
        root, operation, platform, wanted = sys.argv[2:]
        worker(Path(root), operation, platform or None, json.loads(wanted))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("operation")
    parser.add_argument("--cases", default="*", help="comma-separated globs on case names")
    parser.add_argument("--platform", default="", help="of both; default: what each chooses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args(argv)
    # in a process of its own: the workers have the device to themselves
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        wanted = pool.submit(asked, options.operation, options.cases).result()
    if not wanted:
        print(f"no case of {options.operation} matches {options.cases!r}", file=sys.stderr)
        return 2
    start, pair = time.time(), {}
    for label, root in (("old", options.old.resolve()), ("new", checkout.ROOT)):
        log = options.logs / f"{label}.txt" if options.logs else None
        words = [options.operation, options.platform, json.dumps(wanted)]
        pair[label] = Process(root, words, log)
    for process in pair.values():
        process.answer()
    print(f"compiled in {time.time() - start:.0f}s", flush=True)
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(options.rounds):
        for case, mode in wanted:
            for label in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                ms = pair[label].ask(case, mode)
                if ms is not None:
                    found.setdefault((f"{case} {mode}", label), []).append(ms)
        print(f"round {turn + 1} after {time.time() - start:.0f}s", flush=True)
    for process in pair.values():
        process.end()
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
