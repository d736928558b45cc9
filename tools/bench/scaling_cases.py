"""The calls over several devices that ``bench scaling`` times, and what one device computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ejkernel import modules

STRATEGIES = (
    ("ring", "zigzag"), ("ring_packed", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"),
    ("ulysses", "contiguous"),
)  # fmt: skip
COMPILED = {
    "peer memory": ("ring_packed", {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}),
    "combined": ("ring", {"xla_gpu_collective_permute_combine_threshold_bytes": 2**31}),
}
"""Compiler options of a zigzag ring, with the strategy that they are timed with."""
SENDS = {
    "ring": ("collective-permute",),
    "ring_packed": ("collective-permute",),
    "all_gather": ("all-gather", "reduce-scatter"),
    "ulysses": ("all-to-all",),
}

LAYERS = 16
"""Calls in a row that take less time than a host needs to launch a program on several devices."""
RINGS = 4
"""Calls of a shared sequence of up to 64k tokens in a row; longer ones hide what a launch costs."""

Function = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the calls."""

    tokens: tuple[int, ...] = (65536, 131072, 524288)
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
    experts: tuple[int, ...] = (16, 64)
    packed_rows: int = 16384
    width: int = 4096


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
        target: the least share that is good enough; None: the row is for comparison.
        sends: kinds of collectives that the call needs.
        chained: calls in one program, one after the other, as the layers of a model are: then they
            are not timed with what the host takes to launch them, nor with the time in which
            devices wait for each other at the start of a program.
        options: of the compiler, for the call over a mesh on GPUs.
        rows: devices along a second mesh axis ``rows``, over which the batch is spread.
    """

    name: str
    over_mesh: tuple[Callable[[Any], Function], Shapes, tuple[P, ...]]
    local: Callable[[int], tuple[Function, Shapes]]
    even: Callable[[int], tuple[Function, Shapes, int]]
    flops: float = 0.0
    trained: bool = True
    target: float | None = None
    sends: tuple[str, ...] = ()
    chained: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 1

    def runs_on(self, n: int) -> bool:
        """Returns whether ``n`` devices leave at least two for the axis ``x``."""
        return n % self.rows == 0 and n // self.rows > 1

    @property
    def modes(self) -> tuple[str, ...]:
        return ("fwd", "fwd+bwd") if self.trained else ("fwd",)


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
        name = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
        forms = [(*form, 1, f"{' '.join(form)} {name}", {}) for form in STRATEGIES]
        forms += [
            (strategy, "zigzag", 1, f"{strategy} zigzag {name} {word}", options)
            for word, (strategy, options) in COMPILED.items()
        ]
        forms += [(*STRATEGIES[0], 2, f"{' '.join(STRATEGIES[0])} 2 x {name}", {})]
        for strategy, layout, rows, name, options in forms:
            form = (strategy, layout)

            def shapes(rows: int, length: int) -> Shapes:
                return ((rows, length, sizes.heads, sizes.dim),) * 3

            def local(
                n: int, tokens: int = tokens, rows: int = rows, form: Any = form
            ) -> tuple[Function, Shapes]:
                return partial(attend, f"x{n}", *form), shapes(1, tokens * rows // n)

            def even(
                n: int, tokens: int = tokens, rows: int = rows
            ) -> tuple[Function, Shapes, int]:
                # as many pairs of queries and keys as one device has
                length = tokens / math.sqrt(n // rows)
                return causal, shapes(1, 2 * sizes.dim * round(length / (2 * sizes.dim))), 1

            batch_and_length = P("rows" if rows > 1 else None, "x")
            on_axis = partial(attend, "x", *form)
            yield Case(
                name,
                (lambda _, f=on_axis: f, shapes(rows, tokens), (batch_and_length,) * 3),
                local,
                even,
                2.0 * rows * tokens**2 * sizes.heads * sizes.dim,
                target=0.93 if name.startswith("ring") and layout == "zigzag" else None,
                sends=SENDS[strategy],
                chained=max(1, RINGS * 65536 // max(tokens, 65536)),
                options=options,
                rows=rows,
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
            target=0.97,
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
        target=0.96,
        chained=LAYERS,
    )
    starts = jnp.arange(rows + 1, dtype=jnp.int32)

    def decode_packed(*arrays: Any) -> Any:
        return modules.ragged_page_attention(*arrays, lengths, tables, starts, rows)

    def packed_shapes(n: int) -> Shapes:
        cache = (rows * columns, page, 2 * hk // n, sizes.dim)
        return (rows, h // n, sizes.dim), cache

    yield Case(
        "ragged decoding heads",
        (lambda _: decode_packed, packed_shapes(1), (P(None, "x"), heads)),
        lambda n: (decode_packed, packed_shapes(n)),
        lambda n: (decode_packed, packed_shapes(1), n),
        trained=False,
        target=0.96,
        chained=LAYERS,
    )
    width = sizes.latent + sizes.rope

    def latent(n: int, **where: Any) -> Function:
        context = jnp.asarray([sizes.context // n], jnp.int32)
        pages = jnp.arange(sizes.context // n // page, dtype=jnp.int32)[None]
        options = {"latent_dim": sizes.latent, **where}

        def decode(q: Any, cache: Any) -> Any:
            return modules.mla_decode(q, cache, context, pages, **options)

        return decode

    def latent_shapes(n: int) -> Shapes:
        return (1, sizes.latent_heads, width), (sizes.context // n // page, page, width)

    specs = (P(), P("x"))
    yield Case(
        "latent decoding pages",
        (lambda mesh: latent(1, mesh=mesh, in_specs=specs), latent_shapes(1), specs),
        lambda n: (latent(n), latent_shapes(n)),
        lambda n: (latent(1), latent_shapes(1), n),
        trained=False,
        target=0.83,
        sends=("all-gather",),
        chained=LAYERS,
    )


def matmul_cases(sizes: Sizes) -> Iterator[Case]:
    """Columns of experts' matrices over devices, and whole experts with rows on every device."""
    rows, width = sizes.packed_rows, sizes.width
    for experts in sizes.experts:
        counts = jnp.full((experts,), rows // experts, jnp.int32)

        def multiply(lhs: Any, rhs: Any, counts: Any = counts) -> Any:
            first = None if rhs.shape[0] == counts.shape[0] else 0
            return modules.grouped_matmul(lhs, rhs, counts, first)

        def shapes(experts: int, columns: int) -> Shapes:
            return (rows, width), (experts, width, columns)

        def columns_of(n: int, experts: int = experts) -> Shapes:
            return shapes(experts, width // n)

        def experts_of(n: int, experts: int = experts) -> Shapes:
            return shapes(experts // n, width)

        forms = (("columns", P(None, None, "x"), columns_of), ("experts", P("x"), experts_of))
        for word, spec, of_device in forms:
            yield Case(
                f"grouped {word} {experts}",
                (lambda _, f=multiply: f, shapes(experts, width), (P(), spec)),
                lambda n, f=multiply, of_device=of_device: (f, of_device(n)),
                lambda n, f=multiply, g=experts: (f, shapes(g, width), n),
                # rows of a device that has some of the experts are the other devices' too
                2.0 * rows * width * width,
                target=0.97 if word == "columns" else None,
                sends=("all-reduce",),
            )


def linear_cases(sizes: Sizes) -> Iterator[Case]:
    """Heads of linear attention over devices."""

    def attend(q: Any, k: Any, v: Any, g: Any) -> Any:
        return modules.gla_attention(q, k, v, -jnp.abs(g) / 16)

    def shapes(n: int) -> Shapes:
        return ((sizes.batch, sizes.length, sizes.query_heads // n, sizes.dim),) * 4

    yield Case(
        "gla heads",
        (lambda _: attend, shapes(1), (P(None, None, "x"),) * 4),
        lambda n: (attend, shapes(n)),
        lambda n: (attend, shapes(1), n),
        target=0.97,
    )


CASES = (flash_cases, serving_cases, matmul_cases, linear_cases, ring_cases)
