"""Time short decoding calls in a chain, as the layers of a model make them.

    python tools/gpu/latency.py                        # every row
    python tools/gpu/latency.py mla 32768              # rows whose labels have all of these parts
    python tools/gpu/latency.py mla "1 x 8192,1 x 32768"                # commas: any of these
    python tools/gpu/latency.py mla --form "triton splits=2 num_launches=1"

A row is ``CALLS`` calls in one program, each on the result of the one before, so that launches and
the gaps between them count. It is us a call, the median of rounds in which the rows of a case take
turns; ``mla`` has 1.4 to 1.8 us of a concatenation in it, which makes the next query. ``page`` of
one sequence and ``mla`` have forms: a platform and fields of its tiles that differ from the chosen
ones. A form whose result is not that of the first row of its case is WRONG, one that does not run
has its error. Exit status 1: there are such rows. All rows are compiled first, several at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from ejkernel import modules  # noqa: E402
from ejkernel.modules.bench.timing import Program, time_together  # noqa: E402
from ejkernel.ops.execution.trials import disagreement  # noqa: E402
from gpu.sweep import changed, with_choice  # noqa: E402

CALLS = 32
ROUNDS, ROUND_S = 7, 0.01  # and the seconds of a program in a round
CASES = ((1, 1024), (1, 4096), (1, 32768), (8, 1024), (8, 4096), (64, 1024))  # sequences, tokens
LATENT_CASES = ((1, 1024), (1, 4096), (1, 8192), (1, 32768), (1, 131072), (8, 1024))
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
LATENT_HEADS, LATENT, ROPE, LATENT_PAGE = 128, 512, 64, 64
KERNELS = {
    "pallas": "ejkernel.kernels.pallas.gpu.serving.implementation",
    "triton": "ejkernel.kernels.triton.serving.implementation",
}
FORMS = {
    "mla": (
        "pallas",
        "triton",
        "triton num_launches=1",
        "triton num_launches=2",
        "triton splits=4 num_launches=1",
    ),
    "page": ("triton num_launches=1",),
}
COMPILERS = 16

Step = Callable[..., tuple[jax.Array, ...]]


@dataclass(frozen=True)
class Row:
    """A chain of calls.

    Attributes:
        label: operation, sequences x tokens, and the form.
        case: rows of one case are timed together.
        bytes: read by a call.
        make: returns a call, and the query with the caches that it writes to: it returns as many.
    """

    label: str
    case: str
    bytes: int
    make: Callable[[], tuple[Step, tuple[jax.Array, ...]]]


def normal(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)


def tables_of(batch: int, tokens: int, page: int) -> tuple[jax.Array, jax.Array]:
    """Returns the lengths of equal sequences, and tables of shuffled pages."""
    columns = tokens // page
    pages = jax.random.permutation(jax.random.key(9), batch * columns)
    return jnp.full(batch, tokens, jnp.int32), pages.reshape(batch, -1).astype(jnp.int32)


# ---- rows --------------------------------------------------------------------------------------


def attention_rows(batch: int, tokens: int, forms: tuple[str, ...]) -> Iterator[Row]:
    """Yields a row for each operation that decodes from keys and values, and for its forms."""
    size = 2 * batch * tokens * KV_HEADS * DIM * 2
    pages, q_shape = batch * tokens // PAGE, (batch, HEADS, DIM)

    def paged(form: str | None) -> Any:
        lengths, tables = tables_of(batch, tokens, PAGE)
        k, v = (normal(n, pages, PAGE, KV_HEADS, DIM) for n in (1, 2))
        call = modules.page_attention if form is None else with_form("page_attention", form)
        return lambda q: (call(q, k, v, lengths, tables),), (normal(0, *q_shape),)

    def packed() -> tuple[jax.Array, ...]:
        starts = jnp.arange(batch + 1, dtype=jnp.int32)
        return normal(1, pages, PAGE, 2 * KV_HEADS, DIM), *tables_of(batch, tokens, PAGE), starts

    def ragged() -> Any:
        cache, *tables = packed()
        call = modules.ragged_page_attention
        return lambda q: (call(q, cache, *tables, batch),), (normal(0, *q_shape),)

    def written() -> Any:
        cache, *tables = packed()
        new = [normal(n, batch, KV_HEADS, DIM) for n in (2, 3)]
        ends = jnp.full(3, batch, jnp.int32)

        def call(q: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
            return modules.ragged_page_attention_v3(q, *new, cache, *tables, ends)[:2]

        return call, (normal(0, *q_shape), cache)

    def contiguous() -> Any:
        k, v = (normal(n, batch, tokens, KV_HEADS, DIM) for n in (1, 2))
        begin, end = (jnp.full(batch, n, jnp.int32) for n in (0, tokens))
        call = modules.ragged_decode_attention
        return lambda q: (call(q, k, v, begin, end),), (normal(0, *q_shape),)

    def flash() -> Any:
        k, v = (normal(n, batch, tokens, KV_HEADS, DIM) for n in (1, 2))
        call = modules.flash_attention
        return lambda q: (call(q[:, None], k, v)[:, 0],), (normal(0, *q_shape),)

    for form in (None, *(forms if batch == 1 else ())):
        case = f"page {batch} x {tokens}"
        label = f"{case} {form or 'default'}"
        yield Row(label, case, size, lambda form=form: paged(form))
    operations = {"ragged": ragged, "v3": written, "contiguous": contiguous, "flash": flash}
    for name, make in operations.items():
        case = f"{name} {batch} x {tokens}"
        yield Row(case, case, size, make)


def latent_rows(batch: int, tokens: int, forms: tuple[str, ...]) -> Iterator[Row]:
    """Yields the rows of ``mla_decode``: automatic choice, and each of the forms."""

    def make_chain(form: str | None) -> Any:
        lengths, tables = tables_of(batch, tokens, LATENT_PAGE)
        cache = normal(1, batch * tokens // LATENT_PAGE, LATENT_PAGE, LATENT + ROPE)
        decode = modules.mla_decode if form is None else with_form("mla_decode", form)

        def call(q: jax.Array) -> tuple[jax.Array]:
            o = decode(q, cache, lengths, tables, latent_dim=LATENT)
            return (jnp.concatenate([o, q[..., LATENT:]], axis=-1),)

        return call, (normal(0, batch, LATENT_HEADS, LATENT + ROPE),)

    case = f"mla {batch} x {tokens}"
    for form in (None, *forms):
        label = f"{case} {form or 'default'}"
        size = batch * tokens * (LATENT + ROPE) * 2
        yield Row(label, case, size, lambda form=form: make_chain(form))


def with_form(operation: str, form: str) -> Callable[..., jax.Array]:
    """Returns an operation on a platform with other fields of its tiles, as ``FORMS`` has them.

    Raises:
        KeyError, ValueError, AttributeError: it is not a platform with the operation and FIELD=N.
    """
    platform, *pairs = form.split()
    values: Mapping[str, int] = {name: int(n) for name, n in (pair.split("=") for pair in pairs)}
    kernel: Any = getattr(importlib.import_module(KERNELS[platform]), operation)
    return with_choice(kernel, lambda *problem: changed(kernel.choose(*problem), values))


def rows_of(parts: list[str], forms: tuple[str, ...]) -> list[Row]:
    """Returns the rows whose labels have all of these parts: words, of several by commas one."""
    page, mla = (tuple(dict.fromkeys((*FORMS[name], *forms))) for name in ("page", "mla"))
    rows = [row for case in CASES for row in attention_rows(*case, page)]
    rows += [row for case in LATENT_CASES for row in latent_rows(*case, mla)]
    choices = [part.split(",") for part in parts]
    return [
        row for row in rows if all(any(f" {x} " in f" {row.label} " for x in c) for c in choices)
    ]


# ---- timing ------------------------------------------------------------------------------------


def chain(call: Step) -> Step:
    """Returns a function of ``CALLS`` calls."""

    def run_all(*carried: jax.Array) -> tuple[jax.Array, ...]:
        for _ in range(CALLS):
            carried = call(*carried)
        return carried

    return run_all


def prepare(row: Row) -> tuple[Any, Callable[[], Any]] | str:
    """Returns the result of one call and its compiled chain, or why it does not run."""
    try:
        call, arrays = row.make()
        first = jax.block_until_ready(jax.jit(call)(*arrays))[0]
        written = range(1, len(arrays))  # in place, as a server donates its caches
        compiled = jax.jit(chain(call), donate_argnums=written).lower(*arrays).compile()
        return first, Program(compiled, arrays, dict(zip(written, written, strict=True)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"


def time_case(rows: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Returns us a call of the rows that can be timed, and what is wrong with the others.

    ``rows``: what ``prepare`` returned, by label.
    """
    programs, wrong, expected = {}, {}, None
    for label, prepared in rows.items():
        if isinstance(prepared, str):
            wrong[label] = prepared
            continue
        first, program = prepared
        why = None if expected is None else disagreement(first, expected)
        expected = first if expected is None else expected
        if why is None:
            # not a Program itself, whose kernels would be timed without the gaps between them
            programs[label] = lambda program=program: program()
        else:
            wrong[label] = f"WRONG: {why}"
    times = time_together(programs, rounds=ROUNDS, target_s=ROUND_S)
    return {name: timing.median * 1e6 / CALLS for name, timing in times.items()}, wrong


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="latency", description=(__doc__ or "").splitlines()[0])
    p.add_argument("parts", nargs="*", help="a row's label must have all of them; A,B: A or B")
    p.add_argument(
        "--form", action="append", default=[], help="of page, mla: PLATFORM FIELD=N FIELD=N"
    )
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows, failed = rows_of(args.parts, tuple(args.form)), False
    if not rows:
        print(f"no row has all of {args.parts}")
        return 2
    checkout.register()
    width = max(len(row.label) for row in rows)
    with ThreadPoolExecutor(COMPILERS) as pool:
        prepared = dict(zip((row.label for row in rows), pool.map(prepare, rows), strict=True))
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        times, wrong = time_case({row.label: prepared[row.label] for row in mine})
        for row in mine:
            us = times.get(row.label)
            text = wrong.get(row.label) if us is None else f"{us:8.2f} us, {row.bytes / 1e6:.2f} MB"
            print(f"{row.label:{width}} {text}", flush=True)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
