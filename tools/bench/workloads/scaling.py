"""One call over several devices: the time of each, and that of one device with the same work.

``alone`` rows: the kernels of one device of several without communication, on a machine with any
number of devices (``bench.one_of_many``). ``together`` rows: the call itself, over all devices
there are; how much of the communication kernels hide is read from a profile of the GPUs.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench import one_of_many, overlap, report
from ejkernel import modules
from ejkernel.modules.bench.case import forward_and_backward
from ejkernel.modules.bench.runner import MOST_COMPILERS
from ejkernel.modules.bench.timing import Program, Timing, time_together
from ejkernel.ops.execution.progress import first_line

COLLECTIVES = re.compile(
    r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
)
BACKWARD = 3.5
"""Operations of both passes over those of the forward pass."""
STRATEGIES = (
    ("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("ulysses", "contiguous"),
)  # fmt: skip
GRADIENTS = (0, 1, 2)

Function = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the calls."""

    tokens: tuple[int, ...] = (65536, 131072)
    heads: int = 16
    dim: int = 128
    batch: int = 4
    length: int = 8192
    query_heads: int = 32
    kv_heads: int = 8
    rows: int = 64
    page: int = 64
    context: int = 131072
    latent: int = 512
    rope: int = 64
    latent_heads: int = 128


@dataclass(frozen=True)
class Case:
    """A call, and what one of its devices computes.

    Attributes:
        name: for the table.
        over_mesh: the call over a mesh whose axis is ``x``; shapes of its arrays; their specs.
        local: of a number of devices, the call of one and its shapes.
        even: of a number of devices, a call on one device, its shapes, and how often it has the
            work of one of them.
        flops: operations of the forward pass, 0 where memory limits it.
        trained: whether gradients are timed too.
    """

    name: str
    over_mesh: tuple[Callable[[Any], Function], Shapes, tuple[P, ...]]
    local: Callable[[int], tuple[Function, Shapes]]
    even: Callable[[int], tuple[Function, Shapes, int]]
    flops: float = 0.0
    trained: bool = True

    @property
    def modes(self) -> tuple[str, ...]:
        return ("fwd", "fwd+bwd") if self.trained else ("fwd",)


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
    note: str = ""

    def __str__(self) -> str:
        head = f"{self.case:<28} {self.mode:<8} {self.kind:<8} n={self.devices}"
        if self.ms is None:
            return f"{head} {self.note}"
        rate = f" {self.tflops:7.0f} TFLOP/s" if self.tflops else ""
        sent = " ".join(f"{n} {kind}" for kind, n in self.collectives.items())
        hidden = "" if self.hidden is None else f", {self.hidden:.0%} hidden"
        memory = f" {self.temp_mb:8.0f} MiB (even {self.even_temp_mb:.0f})"
        return f"{head} {self.ms:9.3f} ms {self.share:5.2f}{rate}{memory} {sent}{hidden}"


# ---- cases --------------------------------------------------------------------------------------


def causal(q: Any, k: Any, v: Any) -> Any:
    return modules.flash_attention(q, k, v, causal=True)


def ring_cases(sizes: Sizes) -> Iterator[Case]:
    """A sequence that devices share."""

    def attend(axis: str, strategy: str, layout: Any, *arrays: Any) -> Any:
        return modules.ring_attention(
            *arrays, axis_name=axis, causal=True, layout=layout,
            cfg={"context_parallel": strategy},
        )  # fmt: skip

    for tokens in sizes.tokens:

        def shapes(length: int) -> Shapes:
            return ((1, length, sizes.heads, sizes.dim),) * 3

        def even(n: int, tokens: int = tokens) -> tuple[Function, Shapes, int]:
            # as many pairs of queries and keys
            length = 2 * sizes.dim * round(tokens / math.sqrt(n) / (2 * sizes.dim))
            return causal, shapes(length), 1

        for strategy, layout in STRATEGIES:
            form = (strategy, layout)

            def local(n: int, tokens: int = tokens, form: Any = form) -> tuple[Function, Shapes]:
                return partial(attend, f"x{n}", *form), shapes(tokens // n)

            on_axis = partial(attend, "x", *form)
            length = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
            yield Case(
                f"{strategy} {layout} {length}",
                (lambda _, f=on_axis: f, shapes(tokens), (P(None, "x"),) * 3),
                local,
                even,
                2.0 * tokens**2 * sizes.heads * sizes.dim,
            )


def flash_cases(sizes: Sizes) -> Iterator[Case]:
    """Rows or heads over devices, which need nothing of each other."""

    def shapes(batch: int, heads: int, kv_heads: int) -> Shapes:
        keys = (batch, sizes.length, kv_heads, sizes.dim)
        return (batch, sizes.length, heads, sizes.dim), keys, keys

    b, h, hk = sizes.batch, sizes.query_heads, sizes.kv_heads
    for word, spec in (("batch", P("x")), ("heads", P(None, None, "x"))):

        def local(n: int, word: str = word) -> tuple[Function, Shapes]:
            return causal, shapes(b // n, h, hk) if word == "batch" else shapes(b, h // n, hk // n)

        yield Case(
            f"flash {word}",
            (lambda _: causal, shapes(b, h, hk), (spec,) * 3),
            local,
            lambda n: (causal, shapes(b, h, hk), n),
            2.0 * b * sizes.length**2 * h * sizes.dim,
        )


def serving_cases(sizes: Sizes) -> Iterator[Case]:
    """Heads of a paged cache over devices, and the pages of one long sequence."""
    rows, page, h, hk = sizes.rows, sizes.page, sizes.query_heads, sizes.kv_heads
    columns = sizes.length // page
    tables = jnp.arange(rows * columns, dtype=jnp.int32).reshape(rows, columns)
    lengths = jnp.full((rows,), sizes.length, jnp.int32)

    def decode(*arrays: Any) -> Any:
        return modules.page_attention(*arrays, lengths, tables)

    def shapes(n: int) -> Shapes:
        cache = (rows * columns, page, hk // n, sizes.dim)
        return (rows, 1, h // n, sizes.dim), cache, cache

    heads = P(None, None, "x")
    yield Case(
        "paged decoding heads",
        (lambda _: decode, shapes(1), (heads,) * 3),
        lambda n: (decode, shapes(n)),
        lambda n: (decode, shapes(1), n),
        trained=False,
    )
    width = sizes.latent + sizes.rope

    def latent(n: int, **where: Any) -> Function:
        context = jnp.asarray([sizes.context // n], jnp.int32)
        pages = jnp.arange(sizes.context // n // page, dtype=jnp.int32)[None]
        options = {"latent_dim": sizes.latent, **where}
        return lambda q, cache: modules.mla_decode(q, cache, context, pages, **options)

    def latent_shapes(n: int) -> Shapes:
        return (1, sizes.latent_heads, width), (sizes.context // n // page, page, width)

    specs = (P(), P("x"))
    yield Case(
        "latent decoding pages",
        (lambda mesh: latent(1, mesh=mesh, in_specs=specs), latent_shapes(1), specs),
        lambda n: (latent(n), latent_shapes(n)),
        lambda n: (latent(1), latent_shapes(1), n),
        trained=False,
    )


# ---- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One program to be timed: its function, and the types of its arrays."""

    function: Function
    shapes: Shapes
    mode: str
    shardings: tuple[NamedSharding, ...] = ()

    def lower(self) -> Any:
        function = self.function
        run = forward_and_backward(function, GRADIENTS) if self.mode == "fwd+bwd" else function
        places = self.shardings or (None,) * len(self.shapes)
        types = [
            jax.ShapeDtypeStruct(shape, dtype(), sharding=sharding)
            for shape, sharding in zip(self.shapes, places, strict=True)
        ]
        return jax.jit(run).lower(*types)

    def program(self, compiled: Any) -> Program:
        """Returns the program with arrays."""
        places = self.shardings or (None,) * len(self.shapes)
        keys = jax.random.split(jax.random.key(0), len(self.shapes))
        arrays = []
        for key, shape, sharding in zip(keys, self.shapes, places, strict=True):
            draw = partial(jax.random.normal, shape=shape, dtype=dtype())
            arrays.append(jax.jit(draw, out_shardings=sharding)(key))
        return Program(compiled, arrays)


def dtype() -> Any:
    return jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32


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
            run = Run(*self.case.local(self.n), self.mode)
            # the last device has the most of a causal mask
            with one_of_many.as_device(self.n - 1, self.n):
                return run, run.lower()
        devices = jax.devices()[: self.n]
        mesh = jax.make_mesh((self.n,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
        make, shapes, specs = self.case.over_mesh
        places = tuple(NamedSharding(mesh, spec) for spec in specs)
        run = Run(make(mesh), shapes, self.mode, places)
        return run, run.lower()

    def lower_even(self) -> tuple[Run, Any]:
        """Returns the same work on one device, and its lowered form."""
        run = Run(*self.case.even(self.n)[:2], self.mode)
        return run, run.lower()

    def row(self, program: Program, even: Program, args: argparse.Namespace) -> Row:
        together = self.kind == "together"
        # the clock of the kernels would add up the kernels of all devices
        call = (lambda: program()) if together else program
        times: dict[str, Timing] = time_together(
            {"even": even, self.kind: call}, rounds=args.rounds, target_s=args.target_s
        )
        ms, even_ms = (times[name].median * 1e3 for name in (self.kind, "even"))
        flops = self.case.flops / self.n * (BACKWARD if self.mode == "fwd+bwd" else 1.0)
        collectives = COLLECTIVES.findall(program.compiled.as_text()) if together else ()
        profiled = together and jax.default_backend() == "gpu"
        return replace(
            self.failed(""),
            ms=ms,
            share=even_ms / self.case.even(self.n)[2] / ms,
            tflops=flops / (ms * 1e-3) / 1e12 if flops else None,
            temp_mb=temp_mb(program),
            even_temp_mb=temp_mb(even),
            collectives=dict(Counter(collectives)),
            hidden=overlap.profiled_share(program) if profiled else None,
        )

    def failed(self, reason: str) -> Row:
        return Row(self.case.name, self.mode, self.kind, self.n, note=reason)


def measurements(args: argparse.Namespace, sizes: Sizes) -> Iterator[Measurement]:
    """Yields what the command asks for, as far as there are devices."""
    counts = [n for n in map(int, args.devices.split(",")) if n > 1]
    kinds = [("alone", n) for n in counts]
    kinds += [("together", n) for n in counts if n <= len(jax.devices())]
    for cases in (ring_cases, flash_cases, serving_cases):
        for case in cases(sizes):
            if any(fnmatch.fnmatchcase(case.name, glob) for glob in args.cases.split(",")):
                yield from (
                    Measurement(case, mode, kind, n) for kind, n in kinds for mode in case.modes
                )


class Compiler:
    """Compiles the programs of a few measurements at a time; what several compare with, once."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, MOST_COMPILERS)))
        self.evens: dict[Any, Any] = {}

    def programs(self, m: Measurement) -> Callable[[], tuple[Program, Program]]:
        """Lowers two programs and begins to compile them; returns a function that waits."""
        run, lowered = m.lower()
        compiled, same = self.pool.submit(lowered.compile), (m.case.even(m.n)[1], m.mode)
        if same not in self.evens:
            even, lowered = m.lower_even()
            self.evens[same] = even, self.pool.submit(lowered.compile)
        even, compiled_even = self.evens[same]
        return lambda: (run.program(compiled.result()), even.program(compiled_even.result()))


def rows_of(args: argparse.Namespace, sizes: Sizes) -> Iterator[Row]:
    """Yields the rows of one case, pass and kind after the other, whose programs compile together.

    One that fails says why: sizes that devices do not divide, too little memory.
    """
    compiler = Compiler()

    def attempt(m: Measurement, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            return m.failed(f"not run: {type(error).__name__}: {first_line(str(error))[:120]}")

    for _, group in itertools.groupby(measurements(args, sizes), lambda m: (m.case.name, m.kind)):
        started, pending = time.monotonic(), []
        for m in group:
            pending.append((m, attempt(m, compiler.programs, m)))
        for m, programs in pending:
            if not isinstance(programs, Row):
                programs = attempt(m, programs)
            if isinstance(programs, Row):
                yield programs
                continue
            if started:
                print(f"{time.monotonic() - started:.1f} s until the first program", flush=True)
                started = 0.0
            yield attempt(m, m.row, *programs, args)


def main(args: argparse.Namespace, sizes: Sizes = Sizes()) -> int:
    """Prints a row for each case, pass and number of devices; writes ``scaling.json``."""
    rows = []
    for row in rows_of(args, sizes):
        print(row, flush=True)
        rows.append(asdict(row))
    device = jax.devices()[0].device_kind
    report.write_json(args.out, "scaling", {"device": device, "rows": rows})
    if not rows:
        print("scaling: no case has such a name", file=sys.stderr)
    return 0 if rows else 2
