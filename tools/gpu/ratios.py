"""Time calls next to plainer calls, or next to a copy of the bytes that they move.

    python tools/gpu/ratios.py                       # every row
    python tools/gpu/ratios.py delta tree            # rows whose names have one of these parts
    python tools/gpu/ratios.py flash                 # 8 bits, options, narrow heads

A row is milliseconds of a call and of the one next to it, and their ratio with the ratio that is
aimed at. Both are timed alternately in one process, short ones by the kernels' own time; some rows
are milliseconds of one call alone. All programs are compiled first, several at once.
Exit status 1: a row did not run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()
sys.path.insert(0, str(checkout.ROOT / "docs" / "examples"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from ejkernel import modules  # noqa: E402
from ejkernel.modules.bench.case import forward_and_backward, ours  # noqa: E402
from ejkernel.modules.bench.timing import Program, time_together  # noqa: E402
from ejkernel.modules.workloads import Call, call_of  # noqa: E402
from ejkernel.modules.workloads.find import shapes_of  # noqa: E402

COMPILERS = 16
ROUNDS, ROUND_S = 9, 0.05
OPTIONS_PLATFORM = "triton"  # of options that Hopper's kernels do not take
SEQUENCES, CONTEXT, PAGE = 16, 8192, 16
HEADS, KV_HEADS, DIM = 32, 8, 128
CONTINUATIONS, LONGEST = 64, 256  # of a prefix of CONTEXT tokens, and most tokens of one

Arrays = tuple[jax.Array, ...]
Timed = tuple[Callable[..., Any], Arrays]  # a function of its arrays


@dataclass(frozen=True)
class Row:
    """A call next to another one.

    Attributes:
        name: of the row.
        aim: the ratio of times that is aimed at, None without one.
        make: returns the call, and what is timed next to it if anything is.
    """

    name: str
    aim: float | None
    make: Callable[[], tuple[Timed, ...]]


def named_call(operation: str, shape: str) -> Call:
    return call_of(next(s for s in shapes_of(operation) if s.name == shape), operation)


def passes(call: Call, backward: bool) -> Callable[..., Any]:
    """Returns the function of a call's arrays, with its gradients or without."""
    gradients = tuple(call.names.index(name) for name in call.gradients)
    return forward_and_backward(ours(call), gradients) if backward else ours(call)


# ---- rows --------------------------------------------------------------------------------------


def packed_delta_rule(backward: bool) -> tuple[Timed, ...]:
    """Uneven sequences next to equal ones."""
    call = named_call("gated_delta_rule", "delta-packed-64k")
    arrays, function = call.make(), passes(call, backward)
    tokens, starts = arrays["query"].shape[1], arrays["cu_seqlens"]
    even = jnp.linspace(0, tokens, starts.size).astype(jnp.int32)
    return (
        (function, tuple(arrays.values())),
        (function, tuple((arrays | {"cu_seqlens": even}).values())),
    )


def delta_rule_step() -> tuple[Timed, ...]:
    """A step next to a pass over its state."""
    call = named_call("gated_delta_rule", "delta-decode-b64")
    arrays = call.make()
    state = arrays["initial_state"]
    return (ours(call), tuple(arrays.values())), (lambda state: state + 1, (state,))


def delta_rule(shape: str, backward: bool) -> tuple[Timed, ...]:
    call = named_call("gated_delta_rule", shape)
    return ((passes(call, backward), tuple(call.make().values())),)


def convolution() -> tuple[Timed, ...]:
    """The forward pass next to a pass over its input."""
    call = named_call("causal_conv1d", "conv-b2-8k")
    arrays = call.make()
    return (ours(call), tuple(arrays.values())), (lambda x: x + 1, (arrays["x"],))


def convolution_gradients() -> tuple[Timed, ...]:
    """The backward pass alone next to a sum of its input and the cotangent."""
    call = named_call("causal_conv1d", "conv-b2-8k")
    arrays = tuple(call.make().values())
    cotangent = arrays[0][:, ::-1]

    def backward(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        return jax.vjp(ours(call), *arrays)[1](cotangent)

    return (backward, (cotangent, *arrays)), (jnp.add, (arrays[0], cotangent))


def tree(nodes: int) -> tuple[Timed, ...]:
    """Trees of new tokens next to as many causal rows."""
    rng, rows = np.random.default_rng(0), SEQUENCES * nodes
    marks = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        marks[node] |= marks[rng.integers(0, node)]
    pages = SEQUENCES * CONTEXT // PAGE
    shapes = (rows, HEADS, DIM), (pages, PAGE, 2 * KV_HEADS, DIM)
    q, cache = (
        jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n, shape in enumerate(shapes)
    )
    arrays = (
        q,
        cache,
        jnp.full(SEQUENCES, CONTEXT, jnp.int32),
        jnp.asarray(rng.permutation(pages).reshape(SEQUENCES, -1), jnp.int32),
        jnp.arange(SEQUENCES + 1, dtype=jnp.int32) * nodes,
    )
    mask = jnp.asarray(np.tile(marks, (SEQUENCES, 1)))

    def causal(*arrays: jax.Array) -> Any:
        return modules.ragged_page_attention(*arrays, SEQUENCES)

    def of_trees(mask: jax.Array, *arrays: jax.Array) -> Any:
        return modules.ragged_page_attention(*arrays, SEQUENCES, tree_mask=mask)

    return (of_trees, (mask, *arrays)), (causal, arrays)


def prefix() -> tuple[Timed, ...]:
    """A prefix that is read once next to tables that all name its pages."""
    shared_prefix: Any = importlib.import_module("shared_prefix")  # of docs/examples
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "dtype": jnp.bfloat16}
    arguments = shared_prefix.make(CONTINUATIONS, CONTEXT, LONGEST, page_size=PAGE, **sizes)
    q, kv, caches, lengths, tables = arguments
    count = CONTEXT // PAGE
    joined = [
        jnp.concatenate([x.reshape(count, *cache.shape[1:]), cache])
        for x, cache in zip(kv, caches, strict=True)
    ]
    shared = jnp.broadcast_to(jnp.arange(count, dtype=tables.dtype), (CONTINUATIONS, count))
    where = lengths + CONTEXT, jnp.concatenate([shared, tables + count], axis=1)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *pages: jax.Array) -> jax.Array:
        return shared_prefix.attend(q, (k, v), pages[:2], *pages[2:])

    return (attend, (q, *kv, *caches, lengths, tables)), (
        modules.page_attention,
        (q, *joined, *where),
    )


def option(shape: str, plain: str, backward: bool) -> tuple[Timed, ...]:
    """A call with an option next to one without, both of Triton."""
    calls = [
        replace(call, options={**call.options, "platform": OPTIONS_PLATFORM})
        for call in (named_call("flash_attention", name) for name in (shape, plain))
    ]
    with_option, without = ((passes(x, backward), tuple(x.make().values())) for x in calls)
    return with_option, without


def padded_heads(shape: str, dim: int, backward: bool) -> tuple[Timed, ...]:
    """A call as it is next to the same with zeros up to heads of ``dim``."""
    call = named_call("flash_attention", shape)
    dense: Any = call.shape
    options = {**call.options, "softmax_scale": dense.head_dim**-0.5}

    def attend(*arrays: jax.Array) -> jax.Array:
        wide = (jnp.pad(x, [*[(0, 0)] * 3, (0, dim - x.shape[-1])]) for x in arrays)
        return modules.flash_attention(*wide, **options)[..., : dense.head_dim]

    both = forward_and_backward(attend, (0, 1, 2)) if backward else attend
    arrays = tuple(call.make().values())
    return (passes(call, backward), arrays), (both, arrays)


def eight_bits(shape: str) -> tuple[Timed, ...]:
    """Quantized operands next to operands of 16 bits."""
    call = named_call("flash_attention", shape)
    arrays = tuple(call.make().values())
    names = ("query", "key", "value", "q_scale", "k_scale", "v_scale")
    quantized = jax.jit(modules.quantize_attention)(*arrays)

    def attend(*arrays: jax.Array) -> jax.Array:
        return modules.flash_attention(**dict(zip(names, arrays, strict=True)), **call.options)

    return (attend, quantized), (ours(call), arrays)


def eight_bit_pages(shape: str) -> tuple[Timed, ...]:
    """Pages of 8 bits next to pages of 16 bits."""
    of_16_bits = shape.replace("-e4m3", "").replace("-int8", "")
    stored, plain = (named_call("ragged_page_attention", name) for name in (shape, of_16_bits))
    both = ((passes(call, False), tuple(call.make().values())) for call in (stored, plain))
    return tuple(both)


def both_passes(name: str, aim: float | None, make: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the rows of a call's forward pass and of both passes."""
    return (
        Row(f"{name} fwd", aim, lambda: make(*arguments, False)),
        Row(f"{name} fwd+bwd", aim, lambda: make(*arguments, True)),
    )


AT_4K = "sweep-d128-s4096-causal"
FLASH = (
    *(
        Row(
            f"flash 8 bits d{d} {mask}",
            1 / 1.5,
            lambda s=f"sweep-d{d}-s16384-{mask}": eight_bits(s),
        )
        for d in (128, 64)
        for mask in ("full", "causal")
    ),
    *both_passes("flash dropout", 1 / 0.8, option, "option-dropout", "option-plain"),
    *both_passes("flash bias", 1 / 0.75, option, "option-4k-bias", AT_4K),
    *both_passes("flash shared bias", 1 / 0.75, option, "option-4k-bias-shared", AT_4K),
    *(
        row
        for d, dim in ((96, 128), (80, 128), (32, 64))
        for row in both_passes(
            f"flash d{d} over d{dim}", None, padded_heads, f"sweep-d{d}-s4096-causal", dim
        )
    ),
    *(
        Row(f"flash {shape}", None, lambda s=shape: eight_bit_pages(s))
        for shape in (
            "prefill-16x1k-e4m3-page16",
            "prefill-8x2k-decode-b56-8k-e4m3-page16",
            "prefill-4x8k-e4m3-page64",
            "prefill-4x8k-int8-page64",
        )
    ),
)

ROWS = (
    *FLASH,
    Row("delta packed fwd", 1.1, lambda: packed_delta_rule(False)),
    Row("delta packed fwd+bwd", 1.1, lambda: packed_delta_rule(True)),
    Row("delta step", 1.05, delta_rule_step),
    Row("conv fwd", 1.1, convolution),
    Row("conv bwd", 1.2, convolution_gradients),
    Row("kda B1 H32 fwd", None, lambda: delta_rule("kimi-linear-b1-8k", False)),
    Row("kda B1 H32 fwd+bwd", None, lambda: delta_rule("kimi-linear-b1-8k", True)),
    Row("kda B2 H16 fwd", None, lambda: delta_rule("delta-channels-b2-8k", False)),
    Row("kda B2 H16 fwd+bwd", None, lambda: delta_rule("delta-channels-b2-8k", True)),
    *(Row(f"tree of {nodes}", 1.0, lambda nodes=nodes: tree(nodes)) for nodes in (8, 64)),
    Row("shared prefix", None, prefix),
)


# ---- timing ------------------------------------------------------------------------------------


def prepare(row: Row) -> list[Program] | str:
    """Returns compiled programs with their arrays, or why they do not run."""
    compiled: dict[Callable[..., Any], Any] = {}
    programs = []
    try:
        for function, arrays in row.make():
            if function not in compiled:
                compiled[function] = jax.jit(lambda *x, f=function: f(*x)).lower(*arrays).compile()
            programs.append(Program(compiled[function], arrays))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return programs


def text_of(row: Row, programs: list[Program]) -> str:
    """Times a row."""
    both = {str(i): program for i, program in enumerate(programs)}
    times = time_together(both, rounds=ROUNDS, target_s=ROUND_S)
    text = "".join(f"{times[name].median * 1e3:10.4f}" for name in both)
    if len(both) == 2:
        text += f"{times['0'].median / times['1'].median:8.3f}"
        text += "" if row.aim is None else f"  aim {row.aim}"
    return f"{text}  ({times['0'].clock})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ratios", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help="a row's name must have one of them")
    args = parser.parse_args(argv)
    rows = [row for row in ROWS if not args.parts or any(part in row.name for part in args.parts)]
    if not rows:
        print(f"no row has any of {args.parts}")
        return 2
    checkout.register()
    failed = False
    with ThreadPoolExecutor(COMPILERS) as pool:
        prepared = list(pool.map(prepare, rows))
    for row, programs in zip(rows, prepared, strict=True):
        failed |= isinstance(programs, str)
        text = programs if isinstance(programs, str) else text_of(row, programs)
        print(f"{row.name:42} {text}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
