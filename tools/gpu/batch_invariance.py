"""Cost of batch invariance on this device, and a search for bits that follow the batch.

    python tools/gpu/batch_invariance.py costs              # milliseconds, and over the default
    python tools/gpu/batch_invariance.py bits               # 500 compositions an operation
    python tools/gpu/batch_invariance.py bits --count 50 --only page_attention

``costs`` times a call as it is and inside ``batch_invariant()``, interleaved, forward and with its
gradients. ``bits`` draws sequences, puts them into batches of random composition, order, pages and
padding, and compares every output and gradient of a sequence with what it had in the first batch.
Batches come in a few shapes, compiled once each. Exits with 1 when bits changed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from ejkernel import modules  # noqa: E402
from ejkernel.modules.bench.case import forward_and_backward, ours  # noqa: E402
from ejkernel.modules.workloads import call_of  # noqa: E402
from ejkernel.modules.workloads.find import shapes_of  # noqa: E402
from ejkernel.ops import batch_invariant  # noqa: E402
from ejkernel.ops.execution.timing import compare_programs  # noqa: E402

Arrays = dict[str, Any]

COSTS = (
    ("page_attention", "decode-b64-4k-uneven", {"context": 8192}),
    ("page_attention", "decode-b64-8k-page16", {}),
    ("page_attention", "decode-b1-8k", {}),
    ("ragged_page_attention", "decode-b64-8k-uneven", {}),
    ("ragged_page_attention", "llama3-8b-mixed", {}),
    ("mla_decode", "deepseek-v3-decode-b64-8k-uneven", {}),
    ("flash_attention", "sweep-d128-s16384-causal", {}),
    ("flash_attention", "sweep-d128-s16384-full", {}),
    ("flash_attention", "sweep-d64-s16384-causal", {}),
    ("flash_attention", "llama3-8b-4k", {}),
    ("grouped_matmul", "mixtral-16k-even", {}),
    ("grouped_matmul", "mixtral-16k-zipf", {}),
)
"""Operation, the name of a shape, and what differs from it."""


@dataclass
class Cost:
    """A call in both forms.

    Attributes:
        name: of its operation, shape and pass.
        programs: compiled, as it is and batch-invariant.
        platforms: whose kernels run, in the same order.
        make: draws the arrays.
    """

    name: str
    programs: list[Any]
    platforms: list[str]
    make: Callable[[], Arrays]


def compile_cost(operation: str, shape: str, changes: dict[str, Any], backward: bool) -> Cost:
    """Compiles a call in both forms."""
    named = next(s for s in shapes_of(operation) if s.name == shape)
    call = call_of(replace(named, **changes), operation)
    f = ours(call)
    if backward:
        f = forward_and_backward(f, tuple(call.names.index(n) for n in call.gradients))
    abstract = call.abstract()
    programs, platforms = [], []
    for on in (False, True):
        with batch_invariant(on):
            jitted = jax.jit(lambda *arrays: f(*arrays))  # one for each form: traces are kept
            programs.append(jitted.lower(*(abstract[n] for n in call.names)).compile())
            with contextlib.redirect_stdout(io.StringIO()):
                shown = modules.explain(operation, **abstract | call.options)
            platforms.append(str(shown.platform))
    mode = "fwd+bwd" if backward else "fwd"
    text = " ".join([operation, shape, *(f"{k}={v}" for k, v in changes.items()), mode])
    return Cost(text, programs, platforms, call.make)


def print_costs(only: str) -> None:
    """Prints milliseconds of both forms and their ratio."""
    cases = [
        (*case, backward)
        for case in COSTS
        for backward in (False, True)
        if only in case[0] and (not backward or case[0] in ("flash_attention", "grouped_matmul"))
    ]
    with ThreadPoolExecutor(12) as pool:
        costs = list(pool.map(lambda case: attempt(compile_cost, *case), cases))
    loaded, arrays = "", ()
    for cost in filter(None, costs):
        shape, _ = cost.name.rsplit(" ", 1)
        if shape != loaded:
            arrays = ()
            loaded, arrays = shape, jax.block_until_ready(tuple(cost.make().values()))
        runs = [partial(program, *arrays) for program in cost.programs]
        default, ours_ = compare_programs(runs, num_warmup=3, num_iters=12)
        assert default is not None and ours_ is not None
        print(
            f"{cost.name:66} {default.ms:8.3f} {ours_.ms:8.3f} {ours_.ms / default.ms:6.3f}"
            f"   {' '.join(cost.platforms)}",
            flush=True,
        )


def attempt(f: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a call, None after printing its error."""
    try:
        return f(*arguments)
    except Exception as error:
        print(f"{arguments}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


# ---- bits --------------------------------------------------------------------------------------

SEQUENCES = 12
HEADS, KV_HEADS, DIM, PAGE, LATENT = 8, 2, 64, 16, 512
LENGTH = 384  # of dense sequences
LENGTHS = np.array([3, 40, 17, 90, 640, 1000, 256, 1500, 33, 2048, 700, 128])
NEW = np.array([1, 5, 12, 1, 130, 1, 2, 1, 33, 1, 64, 1])  # rows of a ragged call
SIZES = (1, 2, 5, 9, 16)  # of batches


def draw(*shape: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Draws normal values."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@dataclass
class Check:
    """One operation.

    Attributes:
        run: a function of arrays that returns outputs, and gradients.
        batch: arrays of a batch of these sequences, and a function that cuts its outputs into
            one list for each sequence.
    """

    run: Callable[[Arrays], Any]
    batch: Callable[[np.ndarray, np.random.Generator], tuple[Arrays, Callable[[Any], Iterator]]]


def rows_of(outputs: Any) -> Iterator[list[np.ndarray]]:
    """Yields the outputs of each batch row."""
    outputs = [np.asarray(x) for x in jax.tree.leaves(outputs)]
    for i in range(outputs[0].shape[0]):
        yield [x[i] for x in outputs]


def cotangent(out: jax.Array) -> jax.Array:
    """Returns a cotangent of an output; the compiler joins it with nothing of the operation."""
    out = jax.lax.optimization_barrier(out)
    return jnp.cos(out.astype(jnp.float32)).astype(out.dtype)


def dense(name: str, arrays: Arrays, shared: Arrays, options: Arrays) -> Check:
    """Returns the check of an operation with a batch axis, gradients included."""
    sequences = {key: np.asarray(x) for key, x in arrays.items()}

    def run(rows: Arrays) -> Any:
        operation = partial(getattr(modules, name), **shared, **options)
        out, pull = jax.vjp(lambda rows: operation(**rows), rows)
        return out, pull(cotangent(out))[0]

    def batch(members: np.ndarray, _: np.random.Generator) -> Any:
        return {key: x[members] for key, x in sequences.items()}, rows_of

    return Check(run, batch)


def dense_checks() -> dict[str, Check]:
    """Returns the checks of dense operations."""
    n, t = SEQUENCES, LENGTH
    q, k, v = (draw(n, t, h, DIM, seed=i) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    qkv = {"query": q, "key": k, "value": v}
    wide = {
        name: draw(n, 700, h, 128, seed=i)
        for i, (name, h) in enumerate((("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS)))
    }
    hopper: Arrays = {"platform": "pallas"}
    linear = {"query": q, "key": draw(n, t, HEADS, DIM, seed=3), "value": q[:, ::-1]}
    decay = {"g": -jnp.abs(draw(n, t, HEADS, seed=4, dtype=jnp.float32))}
    x = {"x": draw(n, t, 256, seed=5)}
    weight = {"weight": draw(256, 4, seed=6)}
    return {
        "flash_attention": dense("flash_attention", qkv, {}, {"causal": True}),
        "flash_attention full": dense("flash_attention", qkv, {}, {}),
        "flash_attention large": dense(
            "flash_attention", qkv | {"query": q * jnp.where(jnp.arange(n) % 3 == 1, 60, 1).astype(
                q.dtype)[:, None, None, None]}, {}, {"causal": True},
        ),
        "flash_attention hopper": dense("flash_attention", wide, {}, {"causal": True} | hopper),
        "flash_attention hopper large": dense(
            "flash_attention",
            wide | {"query": wide["query"] * (1 + 60 * (jnp.arange(n) % 3 == 1)).astype(q.dtype)[
                :, None, None, None]},
            {}, hopper,
        ),
        "flash_attention window": dense(
            "flash_attention", qkv, {}, {"causal": True, "sliding_window": 100}
        ),
        "recurrent_attention": dense("recurrent_attention", linear | decay, {}, {}),
        "gated_delta_rule": dense("gated_delta_rule", linear | decay, {}, {"normalize_qk": True}),
        "causal_conv1d": dense("causal_conv1d", x, weight, {}),
        "mean_pooling": dense("mean_pooling", x, {}, {}),
    }  # fmt: skip


def place_pages(
    members: np.ndarray, rng: np.random.Generator, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a cache in which pages of sequences lie at random, and its tables.

    Both have a size that follows from the batch's alone; unused memory is NaN.
    """
    count, width = len(members), -(-int(LENGTHS.max()) // PAGE) + len(members) % 3
    places = rng.permutation(count * width + 7)[: count * width].reshape(count, width)
    cache = np.full((count * width + 7, PAGE, *tokens.shape[2:]), np.nan, tokens.dtype)
    for row, i in zip(places, members, strict=True):
        full = -(-int(LENGTHS[i]) // PAGE)
        cache[row[:full]] = tokens[i, : full * PAGE].reshape(full, PAGE, *tokens.shape[2:])
    return cache, places.astype(np.int32)


def paged_check(name: str) -> Check:
    """Returns the check of decoding over pages."""
    width = LATENT + 64 if name == "mla_decode" else DIM
    heads = 16 if name == "mla_decode" else HEADS
    tokens = np.asarray(draw(SEQUENCES, 2048, KV_HEADS, 2, width, seed=7))
    query = np.asarray(draw(SEQUENCES, heads, width, seed=8))
    if name == "mla_decode":
        tokens = tokens[:, :, 0, 0]

    def run(a: Arrays) -> Any:
        if name == "mla_decode":
            return modules.mla_decode(**a, latent_dim=LATENT, return_lse=True)
        return modules.page_attention(**a, return_lse=True)

    def batch(members: np.ndarray, rng: np.random.Generator) -> Any:
        cache, tables = place_pages(members, rng, tokens)
        a = {
            "query": query[members],
            "context_lens": LENGTHS[members].astype(np.int32),
            "block_tables": tables,
        }
        if name == "mla_decode":
            return a | {"latent_cache": cache}, rows_of
        caches = {"key_cache": cache[..., 0, :], "value_cache": cache[..., 1, :]}
        return a | caches, rows_of

    return Check(run, batch)


def ragged_check(name: str) -> Check:
    """Returns the check of packed rows over pages, several of them or one a sequence."""
    tokens = np.asarray(draw(SEQUENCES, 2048, KV_HEADS * 2, DIM, seed=7))
    queries = np.asarray(draw(SEQUENCES, int(NEW.max()), HEADS, DIM, seed=8))
    new = NEW if name.endswith("mixed") else np.ones_like(NEW)

    def run(a: Arrays) -> Any:
        if "v3" not in name:
            return modules.ragged_page_attention(**a, return_lse=True)
        return modules.ragged_page_attention_v3(**a, return_lse=True)[:2]

    def batch(members: np.ndarray, rng: np.random.Generator) -> Any:
        cache, tables = place_pages(members, rng, tokens)
        starts = np.concatenate([[0], np.cumsum(new[members])]).astype(np.int32)
        rows = len(members) * int(new.max()) + 8 * (len(members) % 2)  # of this batch size
        packed = np.zeros((rows, HEADS, DIM), queries.dtype)
        written = np.zeros((rows, KV_HEADS * 2, DIM), queries.dtype)
        for at, i in zip(starts[:-1], members, strict=True):
            packed[at : at + new[i]] = queries[i, : new[i]]
            written[at : at + new[i]] = tokens[i, LENGTHS[i] - new[i] : LENGTHS[i]]
        a = {"queries": packed, "block_tables": tables, "query_start_loc": starts}
        lens, count = LENGTHS[members].astype(np.int32), np.array([len(members)], np.int32)
        if "v3" in name:
            a |= {"keys": written[:, ::2], "values": written[:, 1::2], "kv_cache": cache}
            a |= {"kv_lens": lens, "distribution": np.repeat(count, 3) * np.array([0, 0, 1], "i4")}
        else:
            a |= {"kv_pages": cache, "context_lens": lens, "num_seqs": count}

        def cut(outputs: Any) -> Iterator[list[np.ndarray]]:
            outputs = [np.asarray(x) for x in outputs]
            for first, last in itertools.pairwise(starts):
                yield [x[first:last] for x in outputs]

        return a, cut

    return Check(run, batch)


def grouped_check() -> Check:
    """Returns the check of rows of groups, which stand in batches of any sizes of groups."""
    lhs, rhs = np.asarray(draw(SEQUENCES, 512)), draw(6, 512, 256, seed=1)

    def run(a: Arrays) -> Any:
        out, pull = jax.vjp(lambda x: modules.grouped_matmul(x, rhs, a["group_sizes"]), a["lhs"])
        return out, pull(cotangent(out))[0]

    def batch(members: np.ndarray, rng: np.random.Generator) -> Any:
        # rows i of group i % 6, among others
        members = np.sort(np.repeat(members, 9) % SEQUENCES)
        members = members[np.argsort(members % 6, kind="stable")]
        sizes = np.bincount(members % 6, minlength=6).astype(np.int32)

        def cut(outputs: Any) -> Iterator[list[np.ndarray]]:
            yield from rows_of(outputs)

        return {"lhs": lhs[members], "group_sizes": sizes, "members": members}, cut

    return Check(run, batch)


def checks() -> dict[str, Check]:
    """Returns every operation's."""
    ragged = ("ragged_page_attention", "ragged_page_attention mixed",
              "ragged_page_attention_v3 mixed")  # fmt: skip
    return (
        dense_checks()
        | {name: paged_check(name) for name in ("page_attention", "mla_decode")}
        | {name: ragged_check(name) for name in ragged}
        | {"grouped_matmul": grouped_check()}
    )


def compare_bits(name: str, check: Check, count: int) -> int:
    """Returns how many of ``count`` random batches had a sequence whose bits changed."""
    rng = np.random.default_rng(0)
    seen: dict[int, list[bytes]] = {}
    programs: dict[int, Any] = {}
    changed, values = 0, 0
    for number in range(count):
        size = SIZES[number % len(SIZES)]
        members = rng.integers(0, SEQUENCES, size)
        arrays, cut = check.batch(members, rng)
        members = arrays.pop("members", members)
        if size not in programs:
            with batch_invariant():
                programs[size] = jax.jit(lambda a: check.run(a)).lower(arrays).compile()
        parts = list(cut(programs[size](arrays)))
        differs = False
        for i, part in zip(members, parts, strict=True):
            if not all(np.isfinite(x.astype(np.float32)).all() for x in part):
                raise AssertionError(f"{name}: not finite")
            bits = [x.tobytes() for x in part]
            differs |= seen.setdefault(int(i), bits) != bits
            values += 1
        changed += differs
    return changed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["costs", "bits"])
    parser.add_argument("--count", type=int, default=500, help="batches of an operation")
    parser.add_argument("--only", default="", help="a part of the operation's name")
    args = parser.parse_args(argv)
    checkout.register()
    if args.what == "costs":
        print_costs(args.only)
        return 0
    selected = {name: check for name, check in checks().items() if args.only in name}
    failed = 0

    def timed(name: str) -> tuple[str, Any, float]:
        began = time.monotonic()
        changed = attempt(compare_bits, name, selected[name], args.count)
        return name, changed, time.monotonic() - began

    with ThreadPoolExecutor(8) as pool:
        for name, changed, seconds in pool.map(timed, selected):
            failed += changed != 0
            print(f"{name:32} {args.count} batches, {changed} changed, {seconds:.1f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
