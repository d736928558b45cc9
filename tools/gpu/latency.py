"""Time short decoding calls in a chain, as the layers of a model make them.

    python tools/gpu/latency.py                        # every row
    python tools/gpu/latency.py mla 32768              # rows whose labels have all of these parts
    python tools/gpu/latency.py mla --form "triton splits=2 num_launches=1"

A row is ``CALLS`` calls in one program, each on the result of the one before, so that launches and
the gaps between them count. It is us a call, the median of rounds in which the rows of a case take
turns; ``mla`` has 1.4 to 1.8 us of a concatenation in it, which makes the next query. Forms of
``mla`` are a platform and fields of its tiles that differ from the chosen ones; a form whose result
is not that of the first row of its case is WRONG, one that does not run has its error. Exit status
1: there are such rows.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from ejkernel import modules  # noqa: E402
from ejkernel.modules.bench.timing import time_together  # noqa: E402
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
FORMS = (
    "pallas",
    "triton",
    "triton num_launches=1",
    "triton num_launches=2",
    "triton splits=4 num_launches=1",
)


@dataclass(frozen=True)
class Row:
    """A chain of calls.

    Attributes:
        label: operation, sequences x tokens, and the form.
        case: rows of one case are timed together.
        bytes: read by a call.
        make: returns (function of the query, the query).
    """

    label: str
    case: str
    bytes: int
    make: Callable[[], tuple[Callable[[jax.Array], jax.Array], jax.Array]]


def normal(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)


def tables_of(batch: int, tokens: int, page: int) -> tuple[jax.Array, jax.Array]:
    """Returns the lengths of equal sequences, and tables of shuffled pages."""
    columns = tokens // page
    pages = jax.random.permutation(jax.random.key(9), batch * columns)
    return jnp.full(batch, tokens, jnp.int32), pages.reshape(batch, -1).astype(jnp.int32)


# ---- rows --------------------------------------------------------------------------------------


def attention_rows(batch: int, tokens: int) -> Iterator[Row]:
    """Yields a row for each operation that decodes from keys and values."""
    size = 2 * batch * tokens * KV_HEADS * DIM * 2
    pages, q_shape = batch * tokens // PAGE, (batch, HEADS, DIM)

    def paged() -> Any:
        lengths, tables = tables_of(batch, tokens, PAGE)
        k, v = (normal(n, pages, PAGE, KV_HEADS, DIM) for n in (1, 2))
        return lambda q: modules.page_attention(q, k, v, lengths, tables), normal(0, *q_shape)

    def ragged() -> Any:
        lengths, tables = tables_of(batch, tokens, PAGE)
        cache, starts = normal(1, pages, PAGE, 2 * KV_HEADS, DIM), jnp.arange(batch + 1)
        starts = starts.astype(jnp.int32)

        def call(q: jax.Array) -> jax.Array:
            return modules.ragged_page_attention(q, cache, lengths, tables, starts, batch)

        return call, normal(0, *q_shape)

    def contiguous() -> Any:
        k, v = (normal(n, batch, tokens, KV_HEADS, DIM) for n in (1, 2))
        begin, end = (jnp.full(batch, n, jnp.int32) for n in (0, tokens))
        call = modules.ragged_decode_attention
        return lambda q: call(q, k, v, begin, end), normal(0, *q_shape)

    def flash() -> Any:
        k, v = (normal(n, batch, tokens, KV_HEADS, DIM) for n in (1, 2))
        call = modules.flash_attention
        return lambda q: call(q[:, None], k, v)[:, 0], normal(0, *q_shape)

    operations = {"page": paged, "ragged": ragged, "contiguous": contiguous, "flash": flash}
    for name, make in operations.items():
        case = f"{name} {batch} x {tokens}"
        yield Row(case, case, size, make)


def latent_rows(batch: int, tokens: int, forms: tuple[str, ...]) -> Iterator[Row]:
    """Yields the rows of ``mla_decode``: automatic choice, and each of the forms."""

    def make_chain(form: str | None) -> Any:
        lengths, tables = tables_of(batch, tokens, LATENT_PAGE)
        cache = normal(1, batch * tokens // LATENT_PAGE, LATENT_PAGE, LATENT + ROPE)
        decode = modules.mla_decode if form is None else latent_form(form)

        def call(q: jax.Array) -> jax.Array:
            o = decode(q, cache, lengths, tables, latent_dim=LATENT)
            return jnp.concatenate([o, q[..., LATENT:]], axis=-1)

        return call, normal(0, batch, LATENT_HEADS, LATENT + ROPE)

    case = f"mla {batch} x {tokens}"
    for form in (None, *forms):
        label = f"{case} {form or 'default'}"
        size = batch * tokens * (LATENT + ROPE) * 2
        yield Row(label, case, size, lambda form=form: make_chain(form))


def latent_form(form: str) -> Callable[..., jax.Array]:
    """Returns ``mla_decode`` of a platform with other fields of its tiles, as ``FORMS`` has them.

    Raises:
        KeyError, ValueError: it is not a platform and FIELD=N.
    """
    platform, *pairs = form.split()
    values: Mapping[str, int] = {name: int(n) for name, n in (pair.split("=") for pair in pairs)}
    kernel: Any = importlib.import_module(KERNELS[platform]).mla_decode
    return with_choice(kernel, lambda *problem: changed(kernel.choose(*problem), values))


def rows_of(parts: list[str], forms: tuple[str, ...]) -> list[Row]:
    """Returns the rows whose labels have all of these parts, as words or several words."""
    rows = [row for case in CASES for row in attention_rows(*case)]
    rows += [row for case in LATENT_CASES for row in latent_rows(*case, forms)]
    return [row for row in rows if all(f" {part} " in f" {row.label} " for part in parts)]


# ---- timing ------------------------------------------------------------------------------------


def chain(call: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns a program of ``CALLS`` calls."""

    def run_all(q: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            q = call(q)
        return q

    return jax.jit(run_all)


def time_case(rows: list[Row]) -> tuple[dict[str, float], dict[str, str]]:
    """Returns us a call of the rows that can be timed, and what is wrong with the others."""
    programs, wrong, expected = {}, {}, None
    for row in rows:
        try:
            call, q = row.make()
            first = jax.block_until_ready(jax.jit(call)(q))
            run = chain(call)
            jax.block_until_ready(run(q))
        except Exception as error:
            wrong[row.label] = f"{type(error).__name__}: {str(error)[:160]}"
            continue
        why = None if expected is None else disagreement(first, expected)
        expected = first if expected is None else expected
        if why is None:
            programs[row.label] = lambda run=run, q=q: run(q)
        else:
            wrong[row.label] = f"WRONG: {why}"
    times = time_together(programs, rounds=ROUNDS, target_s=ROUND_S)
    return {name: timing.median * 1e6 / CALLS for name, timing in times.items()}, wrong


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="latency", description=(__doc__ or "").splitlines()[0])
    p.add_argument("parts", nargs="*", help="a row's label must have all of them")
    p.add_argument("--form", action="append", default=[], help="of mla: PLATFORM FIELD=N FIELD=N")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows, failed = rows_of(args.parts, (*FORMS, *args.form)), False
    if not rows:
        print(f"no row has all of {args.parts}")
        return 2
    checkout.register()
    width = max(len(row.label) for row in rows)
    for case in dict.fromkeys(row.case for row in rows):
        mine = [row for row in rows if row.case == case]
        times, wrong = time_case(mine)
        for row in mine:
            us = times.get(row.label)
            text = wrong.get(row.label) if us is None else f"{us:8.2f} us, {row.bytes / 1e6:.2f} MB"
            print(f"{row.label:{width}} {text}", flush=True)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
