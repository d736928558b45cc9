"""Cost of batch invariance on this device, and a search for bits that follow the batch.

    python tools/gpu/batch_invariance.py costs              # milliseconds, and over the default
    python tools/gpu/batch_invariance.py bits               # 500 compositions an operation
    python tools/gpu/batch_invariance.py bits --count 50 --only page_attention
    python tools/gpu/batch_invariance.py costs --only s16384,mixtral,mla

``costs`` times a call as it is and inside ``batch_invariant()``, interleaved, forward and with its
gradients. ``bits`` draws sequences, puts them into batches of random composition, order, pages and
padding, and compares every output and gradient of a sequence with what it had in the first batch.
Batches come in a few sizes, compiled once each. Exits with 1 when bits changed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from ejkernel import modules  # noqa: E402
from ejkernel.modules._table import operation_class  # noqa: E402
from ejkernel.modules.bench.case import forward_and_backward, ours  # noqa: E402
from ejkernel.modules.workloads import call_of  # noqa: E402
from ejkernel.modules.workloads.find import shapes_of  # noqa: E402
from ejkernel.ops import batch_invariant  # noqa: E402
from ejkernel.ops.execution.executor import get_default_executor  # noqa: E402
from ejkernel.ops.execution.timing import compare_programs  # noqa: E402
from ejkernel.types.serving import split  # noqa: E402

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


class Run(NamedTuple):
    """A compiled program with its arguments, as clocks of kernels take it."""

    compiled: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)


def compile_cost(operation: str, shape: str, changes: dict[str, Any], backward: bool) -> Cost:
    """Compiles a call in both forms."""
    named = next(s for s in shapes_of(operation) if s.name == shape)
    call = call_of(replace(named, **changes), operation)
    f, function = ours(call), operation_class(operation).shared()
    if backward:
        f = forward_and_backward(f, tuple(call.names.index(n) for n in call.gradients))
    abstract = call.abstract()
    programs, platforms = [], []
    for on in (False, True):
        with batch_invariant(on):
            jitted = jax.jit(lambda *arrays: f(*arrays))  # one for each form: traces are kept
            programs.append(jitted.lower(*(abstract[n] for n in call.names)).compile())
            chosen = get_default_executor().explain(function, **abstract | call.options)
            platforms.append(str(chosen.platform))
    mode = "fwd+bwd" if backward else "fwd"
    text = " ".join([operation, shape, *(f"{k}={v}" for k, v in changes.items()), mode])
    return Cost(text, programs, platforms, call.make)


def print_costs(only: str) -> None:
    """Prints milliseconds of both forms and their ratio."""
    cases = [
        (*case, backward)
        for case in COSTS
        for backward in (False, True)
        if has_part(f"{case[0]} {case[1]}", only)
        and (not backward or case[0] in ("flash_attention", "grouped_matmul"))
    ]
    with ThreadPoolExecutor(12) as pool:
        costs = list(pool.map(lambda case: attempt(compile_cost, *case), cases))
    loaded, arrays = "", ()
    for cost in filter(None, costs):
        shape, _ = cost.name.rsplit(" ", 1)
        if shape != loaded:
            arrays = ()
            loaded, arrays = shape, jax.block_until_ready(tuple(cost.make().values()))
        runs = [Run(program, arrays) for program in cost.programs]
        default, ours_ = compare_programs(runs, num_warmup=3, num_iters=12)
        assert default is not None and ours_ is not None
        print(
            f"{cost.name:66} {default.ms:8.3f} {ours_.ms:8.3f} {ours_.ms / default.ms:6.3f}"
            f"   {' '.join(cost.platforms)}",
            flush=True,
        )


def has_part(name: str, parts: str) -> bool:
    """Returns whether one of the comma-separated parts is in a name."""
    return any(part in name for part in parts.split(","))


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
LENGTH, LONGEST = 200, 1024  # of dense sequences, and of a cache
LENGTHS = np.array([3, 40, 17, 90, 640, 1000, 256, 700, 33, 1024, 320, 128])
NEW = np.array([1, 5, 12, 1, 130, 1, 2, 1, 33, 1, 64, 1])  # rows of a ragged call
SIZES = (1, 3, 8)  # of batches


def draw(*shape: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Draws normal values."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@dataclass
class Check:
    """One operation.

    Attributes:
        run: a function of the arrays of ``batch``, on the device, that returns outputs and
            gradients, each with an axis of rows first.
        batch: draws what a batch of these sequences is besides their arrays, and of every row of
            its outputs the number, among ``rows``, of its reference; -1 without one.
        rows: rows of all sequences together.
    """

    run: Callable[[Arrays], Any]
    batch: Callable[[np.ndarray, np.random.Generator], tuple[Arrays, np.ndarray]]
    rows: int = SEQUENCES


def cotangent(out: jax.Array) -> jax.Array:
    """Returns a cotangent of an output; the compiler joins it with nothing of the operation."""
    out = jax.lax.optimization_barrier(out)
    return jnp.cos(out.astype(jnp.float32)).astype(out.dtype)


def dense(name: str, arrays: Arrays, shared: Arrays, **options: Any) -> Check:
    """Returns the check of an operation with a batch axis, gradients included."""

    def run(a: Arrays) -> Any:
        rows = jax.lax.optimization_barrier({key: x[a["members"]] for key, x in arrays.items()})
        operation = partial(getattr(modules, name), **shared, **options)
        out, pull = jax.vjp(lambda rows: operation(**rows), rows)
        return out, pull(cotangent(out))[0]

    return Check(run, lambda members, _: ({"members": members}, members))


def dense_checks() -> dict[str, Check]:
    """Returns the checks of dense operations."""
    n, t = SEQUENCES, LENGTH
    scales = (1 + 60 * (jnp.arange(n) % 3 == 1)).astype(jnp.bfloat16)[:, None, None, None]

    def qkv(length: int, dim: int) -> Arrays:
        heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
        return {x: draw(n, length, h, dim, seed=i) for i, (x, h) in enumerate(heads.items())}

    few, many = qkv(t, DIM), qkv(700, 128)
    decoded = qkv(1100, DIM)
    decoded["query"] = decoded["query"][:, :1]
    large = {name: x | {"query": x["query"] * scales} for name, x in (("few", few), ("many", many))}
    linear = {"query": few["query"], "key": draw(n, t, HEADS, DIM, seed=3)}
    linear["value"] = few["query"][:, ::-1]
    decay = {"g": -jnp.abs(draw(n, t, HEADS, seed=4, dtype=jnp.float32))}
    x = {"x": draw(n, t, 256, seed=5)}
    weight = {"weight": draw(256, 4, seed=6)}
    latent = {"query": draw(n, t, HEADS, DIM, seed=7), "key_value": draw(n, t, 128, seed=8)}
    latent |= {"b_q": draw(n, t, 32, seed=9), "b_k": draw(n, t, 32, seed=10)}
    matrices = {name: draw(128, HEADS, DIM, seed=i) / 8 for i, name in enumerate(("w_kc", "w_vc"))}
    triton, hopper = {"platform": "triton"}, {"platform": "pallas"}
    return {
        "flash_attention": dense("flash_attention", few, {}, causal=True, **triton),
        "flash_attention large": dense("flash_attention", large["few"], {}, **triton),
        "flash_attention window": dense(
            "flash_attention", few, {}, causal=True, sliding_window=100, **triton
        ),
        "flash_attention one row": dense("flash_attention", decoded, {}, **triton),
        "flash_attention hopper": dense("flash_attention", many, {}, causal=True, **hopper),
        "flash_attention hopper large": dense("flash_attention", large["many"], {}, **hopper),
        "mla_attention": dense("mla_attention", latent, matrices, causal=True, **triton),
        "recurrent_attention": dense("recurrent_attention", linear | decay, {}),
        "gated_delta_rule": dense("gated_delta_rule", linear | decay, {}, normalize_qk=True),
        "causal_conv1d": dense("causal_conv1d", x, weight),
        "mean_pooling": dense("mean_pooling", x, {}),
    }


def draw_pages(members: np.ndarray, rng: np.random.Generator) -> Arrays:
    """Returns places for the pages of a batch; widths of tables follow from its size."""
    count, width = len(members), LONGEST // PAGE + len(members) % 3
    places = rng.permutation(count * width + 7)[: count * width].reshape(count, width)
    lens = LENGTHS[members].astype(np.int32)
    return {"members": members, "tables": places.astype(np.int32), "lens": lens}


def place_pages(a: Arrays, tokens: jax.Array) -> jax.Array:
    """Returns a cache with the pages of a batch; the rest of its memory is NaN."""
    count, width = a["tables"].shape
    pages = LONGEST // PAGE
    rows = tokens[a["members"]].reshape(count, pages, PAGE, *tokens.shape[2:])
    used = jnp.arange(pages) * PAGE < a["lens"][:, None]
    rows = jnp.where(used.reshape(count, pages, *[1] * (rows.ndim - 2)), rows, jnp.nan)
    cache = jnp.full((count * width + 7, *rows.shape[2:]), jnp.nan, tokens.dtype)
    return cache.at[a["tables"][:, :pages]].set(rows)


def paged_check(name: str, latent_heads: int = 16, **options: Any) -> Check:
    """Returns the check of decoding over pages."""
    latent = name == "mla_decode"
    width, heads = (LATENT + 64, latent_heads) if latent else (DIM, HEADS)
    token = () if latent else (KV_HEADS, 2)
    tokens = draw(SEQUENCES, LONGEST, *token, width, seed=7)
    query = draw(SEQUENCES, heads, width, seed=8)

    def run(a: Arrays) -> Any:
        cache, rows = place_pages(a, tokens), query[a["members"]]
        last = a["lens"], a["tables"]
        if latent:
            return modules.mla_decode(
                rows, cache, *last, latent_dim=LATENT, return_lse=True, **options
            )
        caches = cache[..., 0, :], cache[..., 1, :]
        return modules.page_attention(rows, *caches, *last, return_lse=True)

    return Check(run, lambda members, rng: (draw_pages(members, rng), members))


def ragged_check(name: str, **options: Any) -> Check:
    """Returns the check of packed rows over pages, several of them or one a sequence."""
    tokens = draw(SEQUENCES, LONGEST, KV_HEADS * 2, DIM, seed=7)
    queries = draw(SEQUENCES, int(NEW.max()), HEADS, DIM, seed=8)
    new = NEW if "mixed" in name else np.ones_like(NEW)
    most = int(new.max())

    def run(a: Arrays) -> Any:
        owner, number = a["owner"], a["number"]
        packed = queries[owner, number]
        common = {
            "block_tables": a["tables"],
            "query_start_loc": a["starts"],
            "return_lse": True,
        } | options
        cache, count = place_pages(a, tokens), a["tables"].shape[0]
        if "v3" not in name:
            return modules.ragged_page_attention(
                packed, cache, a["lens"], num_seqs=jnp.array([count]), **common
            )
        written = tokens[owner, a["places"]]
        return modules.ragged_page_attention_v3(
            packed, written[:, ::2], written[:, 1::2], cache, a["lens"],
            distribution=jnp.array([0, 0, count]), **common,
        )[:2]  # fmt: skip

    def batch(members: np.ndarray, rng: np.random.Generator) -> Any:
        counts = new[members]
        rows = len(members) * most + 8 * (len(members) % 2)  # of any batch of this size
        owner, number = np.zeros((2, rows), np.int32)
        expected = np.full(rows, -1)
        total = int(counts.sum())
        owner[:total] = np.repeat(members, counts)
        number[:total] = np.concatenate([np.arange(count) for count in counts])
        expected[:total] = owner[:total] * most + number[:total]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        places = np.clip(LENGTHS[owner] - new[owner] + number, 0, None).astype(np.int32)
        a = {"owner": owner, "number": number, "starts": starts, "places": places}
        return a | draw_pages(members, rng), expected

    return Check(run, batch, SEQUENCES * most)


def grouped_check() -> Check:
    """Returns the check of rows of groups, which stand in batches of any sizes of groups."""
    lhs, rhs = draw(SEQUENCES, 512), draw(6, 512, 256, seed=1)

    def run(a: Arrays) -> Any:
        rows = jax.lax.optimization_barrier(lhs[a["members"]])
        out, pull = jax.vjp(lambda x: modules.grouped_matmul(x, rhs, a["sizes"]), rows)
        return out, pull(cotangent(out))[0]

    def batch(members: np.ndarray, rng: np.random.Generator) -> Any:
        members = rng.integers(0, SEQUENCES, 9 * len(members))
        members = members[np.argsort(members % 6, kind="stable")]  # row i is of group i % 6
        sizes = np.bincount(members % 6, minlength=6).astype(np.int32)
        return {"members": members, "sizes": sizes}, members

    return Check(run, batch)


def checks() -> dict[str, Check]:
    """Returns every operation's."""
    hopper = "ragged_page_attention mixed hopper"
    ragged = ("ragged_page_attention", "ragged_page_attention mixed",
              "ragged_page_attention_v3 mixed")  # fmt: skip
    return (
        dense_checks()
        | {name: paged_check(name) for name in ("page_attention", "mla_decode")}
        | {"mla_decode hopper": paged_check("mla_decode", 64, platform="pallas")}
        | {name: ragged_check(name) for name in ragged}
        | {hopper: ragged_check(hopper, platform="pallas", return_lse=False)}
        | {"grouped_matmul": grouped_check()}
    )


def words_of(outputs: Any) -> jax.Array:
    """Returns the bits of every row of outputs, as integers."""
    kinds = {2: jnp.uint16, 4: jnp.uint32}
    leaves = [
        jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32)
        for x in jax.tree.leaves(outputs)
    ]
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in leaves], axis=1)


@jax.jit
def compare_rows(seen: Any, outputs: Any, expected: jax.Array) -> Any:
    """Returns the rows seen so far, and whether a row differs from what was seen of it.

    ``seen``: words of rows, and whether each was seen.
    """
    words, is_seen = seen
    new = words_of(outputs)
    inside = expected >= 0
    row = jnp.where(inside, expected, 0)
    differs = jnp.any(new != words[row], axis=1) & is_seen[row] & inside
    target = jnp.where(inside & ~is_seen[row], row, words.shape[0])
    words = words.at[target].set(new, mode="drop")
    return (words, is_seen.at[target].set(True, mode="drop")), jnp.any(differs)


def compare_bits(name: str, check: Check, count: int) -> int:
    """Returns how many of ``count`` random batches had a sequence whose bits changed."""
    rng = np.random.default_rng(0)
    programs: dict[int, Any] = {}
    seen: Any = None
    changed = []
    for number in range(count):
        size = SIZES[number % len(SIZES)]
        members = rng.integers(0, SEQUENCES, size)
        if number % 7 == 0:
            members[:] = members[0]
        arrays, expected = check.batch(members, rng)
        if size not in programs:
            with batch_invariant():
                programs[size] = jax.jit(lambda a: check.run(a)).lower(arrays).compile()
        outputs = programs[size](arrays)
        if seen is None:
            words = jax.eval_shape(words_of, outputs).shape[1]
            seen = jnp.zeros((check.rows, words), jnp.uint32), jnp.zeros(check.rows, bool)
        seen, differs = compare_rows(seen, outputs, expected)
        changed.append(differs)
    return int(np.sum(jax.device_get(changed)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["costs", "bits"])
    parser.add_argument("--count", type=int, default=500, help="batches of an operation")
    parser.add_argument("--only", default="", help="parts of names, by commas: NAME,NAME")
    args = parser.parse_args(argv)
    checkout.register()
    if args.what == "costs":
        print_costs(args.only)
        return 0
    split.FIXED_STEPS = 4  # so that sequences of up to 16 steps are split
    selected = {name: check for name, check in checks().items() if has_part(name, args.only)}
    failed = 0

    def timed(name: str) -> tuple[str, Any, float]:
        began = time.monotonic()
        changed = attempt(compare_bits, name, selected[name], args.count)
        return name, changed, time.monotonic() - began

    with ThreadPoolExecutor(16) as pool:
        for future in as_completed([pool.submit(timed, name) for name in selected]):
            name, changed, seconds = future.result()
            failed += changed != 0
            print(f"{name:32} {args.count} batches, {changed} changed, {seconds:.1f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
