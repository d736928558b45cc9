"""One call over several devices: the time of each, and that of one device with the same work.

``together`` rows: the call itself, over all devices there are; how much of the communication
kernels hide is read from a profile of the GPUs. ``alone`` rows: the kernels of one device of
several without communication, on a machine with any number of devices (``bench.one_of_many``).

Rows are printed and written one by one. A row that fails says why, and what ``--budget-s`` leaves
no time for is said to be left out, also where a program hangs. Most of the time is a compiler's:
several commands, each with some of the cases, may run side by side on the same devices if they are
given one ``--lock`` file, which each holds while it times a row. They write one record if they have
one ``--out`` folder; ``python -m bench.plot`` draws it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import itertools
import json
import os
import pathlib
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from bench import one_of_many, overlap, report
from bench.scaling_cases import CASES, Case, Function, Shapes, Sizes
from ejkernel.modules.bench.case import forward_and_backward
from ejkernel.modules.bench.runner import MOST_COMPILERS
from ejkernel.modules.bench.timing import Program, Timing, time_together
from ejkernel.ops.execution.progress import first_line

COLLECTIVES = re.compile(
    r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
)
BACKWARD = 3.5
"""Operations of both passes over those of the forward pass."""
GRACE_S = 20.0
"""Seconds after the budget in which the row that runs may end."""
CASES_AHEAD = 3
"""Cases whose programs are compiled while another one is timed."""
LEAST_S = 5.0
"""Seconds that a row needs at least: with fewer left it is not begun."""


@dataclass(frozen=True)
class Row:
    """A time of one call; ``share``: the time of the same work on one device, over it."""

    case: str
    mode: str
    kind: str
    devices: int
    ms: float | None = None
    share: float | None = None
    tflops: float | None = None
    temp_mb: float | None = None
    even_temp_mb: float | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)
    hidden: float | None = None
    target: float | None = None
    unwanted: tuple[str, ...] = ()
    note: str = ""

    @property
    def verdict(self) -> str:
        """Returns whether the row reaches its target, and what it sends that it should not."""
        words = []
        if self.target is not None and self.share is not None:
            met = "met" if self.share >= self.target else "MISSED"
            words.append(f"target {self.target:.2f} {met}")
        if self.unwanted:
            words.append(f"UNWANTED {', '.join(self.unwanted)}")
        return "; ".join(words)

    def __str__(self) -> str:
        head = f"{self.case:<28} {self.mode:<8} {self.kind:<8} n={self.devices}"
        if self.ms is None:
            return f"{head} {self.note}"
        rate = f" {self.tflops:7.0f} TFLOP/s" if self.tflops else ""
        sent = " ".join(f"{n} {kind}" for kind, n in self.collectives.items())
        hidden = "" if self.hidden is None else f", {self.hidden:.0%} hidden"
        memory = f" {self.temp_mb:8.0f} MiB (even {self.even_temp_mb:.0f})"
        verdict = f" [{self.verdict}]" if self.verdict else ""
        return f"{head} {self.ms:9.3f} ms {self.share:5.2f}{rate}{memory} {sent}{hidden}{verdict}"


# ---- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One program to be timed: its function, called several times, and the types of its arrays."""

    function: Function
    shapes: Shapes
    mode: str
    calls: int
    shardings: tuple[NamedSharding, ...] = ()

    def lower(self) -> Any:
        function = self.function
        if self.mode == "fwd+bwd":
            function = forward_and_backward(function, tuple(range(len(self.shapes))))
        function = repeat(function, self.calls)
        places = self.shardings or (None,) * len(self.shapes)
        types = [
            jax.ShapeDtypeStruct(shape, dtype(), sharding=sharding)
            for shape, sharding in zip(self.shapes, places, strict=True)
        ]
        return jax.jit(function).lower(*types)

    def program(self, compiled: Any) -> Program:
        """Returns the program with arrays."""
        places = self.shardings or (None,) * len(self.shapes)
        keys = jax.random.split(jax.random.key(0), len(self.shapes))
        arrays = []
        for key, shape, sharding in zip(keys, self.shapes, places, strict=True):
            draw = partial(jax.random.normal, shape=shape, dtype=dtype())
            arrays.append(jax.jit(draw, out_shardings=sharding)(key))
        return Program(compiled, arrays)


def repeat(function: Function, calls: int) -> Function:
    """Returns a function that makes several calls; each needs all results of the one before.

    Its first array does, and every other with the shape of a result, as layers have keys of their
    own: XLA would send keys that all calls share once. It keeps the multiplication with 0, since
    floats may be NaN.
    """

    def after(x: Any, results: list[Any], is_first: bool) -> Any:
        for result in results:
            if result.shape == x.shape:
                x = x + 0 * result
            elif is_first:
                x = x + 0 * result[(slice(1),) * result.ndim]
        return x

    def call_in_turn(*arrays: Any) -> Any:
        results = function(*arrays)
        for _ in range(calls - 1):
            leaves = jax.tree.leaves(results)
            arrays = tuple(after(x, leaves, i == 0) for i, x in enumerate(arrays))
            results = function(*arrays)
        return results

    return call_in_turn


def has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def dtype() -> Any:
    return jnp.bfloat16 if has_gpu() else jnp.float32


def temp_mb(program: Program) -> float:
    stats = program.compiled.memory_analysis()
    return 0.0 if stats is None else stats.temp_size_in_bytes / 2**20


@dataclass(frozen=True, eq=False)
class Measurement:
    """A row to be: one case, pass, kind and number of devices."""

    case: Case
    mode: str
    kind: str
    n: int

    def lower(self) -> tuple[Run, Any]:
        """Returns the program and its lowered form."""
        if self.kind == "alone":
            run = Run(*self.case.local(self.n), self.mode, self.case.chained)
            # the last device has the most of a causal mask
            sharing = self.n // self.case.rows
            with one_of_many.as_device(sharing - 1, sharing):
                return run, run.lower()
        devices = jax.devices()[: self.n]
        sizes = {"rows": self.case.rows, "x": self.n // self.case.rows}
        sizes = {axis: size for axis, size in sizes.items() if size > 1}
        types = (AxisType.Auto,) * len(sizes)
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)
        make, shapes, specs = self.case.over_mesh
        places = tuple(NamedSharding(mesh, spec) for spec in specs)
        run = Run(make(mesh), shapes, self.mode, self.case.chained, places)
        return run, run.lower()

    def lower_even(self) -> tuple[Run, Any]:
        """Returns the same work on one device, and its lowered form."""
        run = Run(*self.case.even(self.n)[:2], self.mode, self.case.chained)
        return run, run.lower()

    def row(self, program: Program, even: Program, args: argparse.Namespace) -> Row:
        together = self.kind == "together"
        # the clock of the kernels would add up the kernels of all devices
        call = (lambda: program()) if together else program
        times: dict[str, Timing] = time_together(
            {"even": even, self.kind: call}, rounds=args.rounds, target_s=args.target_s
        )
        calls = self.case.chained
        ms, even_ms = (times[name].median * 1e3 / calls for name in (self.kind, "even"))
        flops = self.case.flops / self.n * (BACKWARD if self.mode == "fwd+bwd" else 1.0)
        sent = Counter(COLLECTIVES.findall(program.compiled.as_text()) if together else ())
        profiled = bool(sent) and has_gpu()
        return replace(
            self.failed(""),
            ms=ms,
            share=even_ms / self.case.even(self.n)[2] / ms,
            tflops=flops / (ms * 1e-3) / 1e12 if flops else None,
            temp_mb=temp_mb(program),
            even_temp_mb=temp_mb(even),
            collectives={kind: count // calls for kind, count in sent.items()},
            target=self.case.target if together else None,
            unwanted=tuple(kind for kind in sent if kind not in self.case.sends),
            hidden=overlap.profiled_share(program) if profiled else None,
        )

    def failed(self, reason: str) -> Row:
        return Row(self.case.name, self.mode, self.kind, self.n, note=reason)


def measurements(args: argparse.Namespace, sizes: Sizes) -> Iterator[Measurement]:
    """Yields what the command asks for, as far as there are devices."""
    counts = [n for n in map(int, args.devices.split(",")) if n > 1]
    together = [n for n in counts if n <= len(jax.devices())]
    numbers_of = {"together": together, "alone": counts}
    kinds = [(kind, numbers_of[kind]) for kind in args.kinds.split(",")]
    every = [case for cases in CASES for case in cases(sizes)]
    globs = args.cases.split(",")
    chosen = [case for case in every if any(fnmatch.fnmatchcase(case.name, g) for g in globs)]
    for kind, numbers in kinds:
        # options change how devices exchange arrays, not what one of them computes
        for case in (c for c in chosen if kind == "together" or not c.options):
            sizes_of_mesh = [n for n in numbers if case.runs_on(n)]
            yield from (
                Measurement(case, mode, kind, n) for n in sizes_of_mesh for mode in case.modes
            )


class Compiler:
    """Compiles the programs of a few measurements at a time; what several compare with, once."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, MOST_COMPILERS)))
        self.evens: dict[Any, Any] = {}

    def programs(self, m: Measurement) -> Callable[[float | None], tuple[Program, Program]]:
        """Lowers two programs and begins to compile them; returns a function that waits."""
        run, lowered = m.lower()
        options = m.case.options if m.kind == "together" and has_gpu() else {}
        compiled = self.pool.submit(lowered.compile, dict(options) or None)
        same = (m.case.even(m.n)[1], m.mode)
        if same not in self.evens:
            even, lowered = m.lower_even()
            self.evens[same] = even, self.pool.submit(lowered.compile)
        even, compiled_even = self.evens[same]

        def wait(seconds: float | None) -> tuple[Program, Program]:
            begun = compiled.result(seconds), compiled_even.result(seconds)
            return run.program(begun[0]), even.program(begun[1])

        return wait


class Clock:
    """The time that a command has; without a budget there is no end."""

    def __init__(self, budget_s: float | None) -> None:
        self.end = None if budget_s is None else time.monotonic() + budget_s

    @property
    def left(self) -> float | None:
        return None if self.end is None else self.end - time.monotonic()

    def is_short(self) -> bool:
        return self.left is not None and self.left < LEAST_S


@contextlib.contextmanager
def alone_on_devices(lock: pathlib.Path | None) -> Generator[None]:
    """Holds the lock file, if there is one, so that no other command times a row meanwhile."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def rows_of(args: argparse.Namespace, sizes: Sizes, clock: Clock) -> Iterator[Row]:
    """Yields the rows of one case, pass and kind after the other.

    Compilers work on the next cases while one is timed; tracing, which would take the interpreter
    from the calls, does not. A row that fails says why: sizes that devices do not divide, too
    little memory, no time.
    """
    compiler = Compiler()

    def attempt(m: Measurement, function: Callable[..., Any], *arguments: Any) -> Any:
        if clock.is_short():
            return m.failed("not run: no time left")
        try:
            return function(*arguments)
        except TimeoutError:
            return m.failed("not run: no time left to compile")
        except Exception as error:
            return m.failed(f"not run: {type(error).__name__}: {first_line(str(error))[:120]}")

    every = measurements(args, sizes)
    groups = [list(g) for _, g in itertools.groupby(every, lambda m: (m.case.name, m.kind))]
    begun: list[list[Any]] = []

    def begin() -> None:
        if len(begun) < len(groups):
            begun.append([(m, attempt(m, compiler.programs, m)) for m in groups[len(begun)]])

    for _ in range(CASES_AHEAD):
        begin()
    for at in range(len(groups)):
        begin()
        for m, programs in begun[at]:
            if not isinstance(programs, Row):
                programs = attempt(m, programs, clock.left)
            if isinstance(programs, Row):
                yield programs
                continue
            with alone_on_devices(args.lock):
                row = attempt(m, m.row, *programs, args)
            yield row
    compiler.pool.shutdown(wait=False, cancel_futures=True)


def add_to_record(folder: pathlib.Path, row: Row) -> None:
    """Writes the row to ``scaling.json``, in the place of an earlier one of the same call.

    Rows that other commands wrote stay, if they are of such devices too; a row that was not run
    replaces none.
    """
    path, device = folder / "scaling.json", jax.devices()[0].device_kind
    record = json.loads(path.read_text()) if path.exists() else {}
    rows = record.get("rows", []) if record.get("device") == device else []

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["case"], row["mode"], row["kind"], row["devices"]

    by_key = {key(r): r for r in rows}
    new = asdict(row)
    if row.ms is not None or key(new) not in by_key:
        by_key[key(new)] = new
    report.write_json(folder, "scaling", {"device": device, "rows": list(by_key.values())})


def main(args: argparse.Namespace, sizes: Sizes | None = None) -> int:
    """Prints a row for each case, pass and number of devices; adds them to ``scaling.json``."""
    sizes = sizes or Sizes()
    status, begun, clock = 2, time.monotonic(), Clock(args.budget_s)
    # a collective whose other device has failed never returns
    watch = threading.Timer((args.budget_s or 0.0) + GRACE_S, give_up)
    watch.daemon = True
    if args.budget_s is not None:
        watch.start()
    try:
        for row in rows_of(args, sizes, clock):
            status = 0
            print(f"{time.monotonic() - begun:5.0f} s {row}", flush=True)
            with alone_on_devices(args.lock):
                add_to_record(args.out, row)
    finally:
        watch.cancel()
    if status:
        print("scaling: no case has such a name", file=sys.stderr)
    return status


def give_up() -> None:
    """Ends the process, whatever it waits for."""
    print(
        "scaling: ended, a row did not return in time; the rows before it are written", flush=True
    )
    os._exit(3)
