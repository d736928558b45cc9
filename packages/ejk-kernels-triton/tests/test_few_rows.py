"""Ragged attention of few rows in one launch, through Triton's interpreter, against an oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels.triton.bound_launch import input_order
from ejkernel.kernels.triton.targets import compile_for, cuda_target, rocm_target
from ejkernel.ops import interpret_mode
from ejkernel.types.serving.plan import make_plan
from ejktest import triton_calls
from ejktest.bound import struct
from ejktest.drawn import wild_tables
from ejktest.grids import cover
from ejktest.oracles import paged
from ejktest.tolerance import check_close

pytest.importorskip("triton")

from ejkernel.kernels.triton import ragged_page_attention, ragged_page_attention_v3
from ejkernel.kernels.triton.launch import Launch
from ejkernel.kernels.triton.resources import launch_source, measure
from ejkernel.kernels.triton.serving.few_rows import FewRowsAttention
from ejkernel.kernels.triton.serving.write import RaggedWrite

H, HK, D, PAGE = 8, 2, 16, 16
SINKS = np.random.default_rng(7).standard_normal((H, 3)).astype(np.float32)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one": ((1,), (150,), {}),
    "each one": ((1, 1, 0, 1), (37, 5, 0, 130), {"left": 20, "cap": 2.0}),
    # two rows of no sequence
    "several": ((0, 3, 0, 1, 2, 0, 0, 0), (9, 140, 8, 33, 2, 7, 60, 1), {"aux": SINKS}),
    # seven rows of one sequence are two chunks
    "all of one": ((0, 7, *[0] * 6), (9, 75, *[3] * 6), {}),
}
NAMES = {"left": "sliding_window", "cap": "logits_soft_cap", "aux": "softmax_aux"}


def draw(rows, lens, cache="float32"):
    """Returns queries, new keys and values, a cache, lengths, tables and starts."""
    rng = np.random.default_rng(0)
    tables, pages = wild_tables(rng, lens, PAGE)
    starts = np.cumsum([0, *rows]).astype(np.int32)
    count = min(sum(rows) + 2, max(len(rows), sum(rows)))
    q = rng.standard_normal((count, H, D)).astype(np.float32)
    keys, values = rng.standard_normal((2, count, HK, D)).astype(np.float32)
    kv = rng.standard_normal((pages, PAGE, 2 * HK, D)).astype(getattr(ml_dtypes, cache, cache))
    return q, keys, values, kv, np.asarray(lens, np.int32), np.asarray(tables), starts


def expected(q, kv, lens, tables, starts, **options):
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in (q, kv)]
        if "aux" in options:
            options["aux"] = options["aux"].astype(np.float64)
        out = paged.ragged_page_attention(
            *wide, lens, tables, starts, len(lens), scale=D**-0.5, return_lse=True, **options
        )
        return jax.tree.map(np.asarray, out)


# one program a sequence and head, or partial results of many, which the last one merges
@pytest.mark.parametrize(
    ("name", "cores"),
    cover(
        itertools.product(CASES, (2, 40)),
        ("one", 40),
        ("each one", 2),
        ("several", 40),
        ("all of one", 2),
    ),
)
def test_against_the_reference(name, cores):
    rows, lens, oracle_options = CASES[name]
    q, keys, values, kv, *tables = draw(rows, lens)
    options = {NAMES[n]: x for n, x in oracle_options.items()}
    with interpret_mode(), compile_for(cuda_target(90, cores)):
        out, lse = ragged_page_attention(q, kv, *tables, len(rows), return_lse=True, **options)
        counts = np.array([0, 0, len(rows)])
        written, cache = ragged_page_attention_v3(
            q, keys, values, kv, *tables, counts, cfg={"num_splits": 3}, **options
        )
    want, want_lse = expected(q, kv, *tables, **oracle_options)
    check_close(np.asarray(out), want, name=name)
    check_close(np.asarray(lse), want_lse, name="lse")
    want_cache = np.asarray(
        paged.write_pages(*map(jnp.asarray, (kv, keys, values)), *tables, len(rows))
    )
    np.testing.assert_array_equal(cache, want_cache)
    want, _ = expected(q, want_cache, *tables, **oracle_options)
    check_close(np.asarray(written), want, name="after the write")


@pytest.mark.parametrize("cache", cover(["int8", "float8_e5m2"], "int8"))
def test_eight_bit_caches(cache):
    rows, lens, _ = CASES["several"]
    q, keys, values, kv, *tables = draw(rows, lens)
    kv = np.clip(np.round(kv * 40), -100, 100).astype(getattr(ml_dtypes, cache, cache))
    with interpret_mode(), compile_for(cuda_target(90, 40)):
        out, new = ragged_page_attention_v3(
            *(x.astype(ml_dtypes.bfloat16) for x in (q, keys, values)), kv, *tables,
            np.array([0, 0, len(rows)]), k_scale=np.float32(0.025), v_scale=np.float32(0.03),
        )  # fmt: skip
    scales = {"k_scale": np.full(HK, 0.025), "v_scale": np.full(HK, 0.03)}
    q = q.astype(ml_dtypes.bfloat16)
    want, _ = expected(q, np.asarray(new).astype(np.float32), *tables, **scales)
    check_close(np.asarray(out), want)


def test_traced_starts_out_of_order_are_safe():
    """Rows belong to the first sequence that reaches them; pages that are none are clipped."""
    q, keys, values, kv, _, tables, _ = draw((2, 1, 3), (30, 20, 25))
    lens, starts = np.array([1000, -5, 30], np.int32), np.array([1, 4, 2, 2**31 - 1], np.int32)
    args = (q, keys, values, kv, lens, tables - 30, starts, np.array([0, 0, 9], np.int32))
    with interpret_mode(), compile_for(cuda_target(90, 40)):
        out, cache = jax.jit(ragged_page_attention_v3)(*args)
    assert np.isfinite(np.asarray(out)).all() and np.isfinite(np.asarray(cache)).all()
    assert not np.asarray(out)[0].any() and np.asarray(out)[1:4].any()


def test_a_cache_outside_the_memory_of_its_operand(monkeypatch):
    """XLA may put the cache that a call takes or returns elsewhere (``in_place``)."""
    rows, lens, _ = CASES["several"]
    q, keys, values, kv, *tables = draw(rows, lens)
    args = (q, keys, values, kv, *tables, np.array([0, 0, len(rows)]))
    moved = []

    def bind_elsewhere(launch, target):
        bound = Launch.bind(launch, target)
        cache = launch.result("cache")
        if cache is None:
            return bound
        moved.append(type(launch))
        aliases = bound.aliases.items()
        aliased = {operand: result for operand, result in aliases if result != cache.index}
        return replace(bound, aliases=aliased)

    with interpret_mode(), compile_for(cuda_target(90, 40)):
        expected = ragged_page_attention_v3(*args)
        for launch in (RaggedWrite, FewRowsAttention):
            monkeypatch.setattr(launch, "bind", bind_elsewhere)
        jax.clear_caches()
        found = ragged_page_attention_v3(*args)
    assert moved == [RaggedWrite, FewRowsAttention]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def planned(args, counts, max_query_len=None):
    """Returns the plan of drawn arguments."""
    lens, _, starts = args[-3:]
    return make_plan(lens, starts, counts, args[0].shape[0], max_query_len)


def test_a_plan_changes_no_bit():
    rows, lens, _ = CASES["several"]
    args = draw(rows, lens)
    counts = np.array([0, 0, len(rows)])
    with interpret_mode(), compile_for(cuda_target(90, 40)):
        found, usual = (
            ragged_page_attention_v3(*args, counts, plan=plan, return_lse=True)
            for plan in (planned(args, len(rows)), None)
        )
    jax.tree.map(np.testing.assert_array_equal, found, usual)


def test_a_plan_of_many_rows():
    """Rows that a plan says are decoded: none of a sequence, up to three, and rows of none."""
    counts = (1, 3, 0, 2, 1, 1, 2, 0, 1, 1) * 4
    lens = tuple(3 + 5 * i for i in range(40))
    args = draw(counts, lens)
    q, keys, values, kv, *tables = args
    assert q.shape[0] > sum(counts[:30])
    with interpret_mode(), compile_for(cuda_target(90, 6)):
        out, lse = ragged_page_attention(
            q, kv, *tables, 30, return_lse=True, plan=planned(args, 30, 3)
        )
        ends = np.array([0, 0, 30])
        written, cache = ragged_page_attention_v3(
            q, keys, values, kv, *tables, ends, plan=planned(args, 30, 3)
        )
    lens, table, starts = (x[:n] for x, n in zip(tables, (30, 30, 31), strict=True))
    want, want_lse = expected(q, kv, lens, table, starts)
    check_close(np.asarray(out), want)
    check_close(np.asarray(lse), want_lse, name="lse")
    new = map(jnp.asarray, (kv, keys, values))
    want_cache = np.asarray(paged.write_pages(*new, lens, table, starts, 30))
    np.testing.assert_array_equal(cache, want_cache)
    check_close(np.asarray(written), expected(q, want_cache, lens, table, starts)[0])


def traced(rows, n, writes, target, heads=32, kv_heads=8, dtype="bfloat16", max_query_len=None):
    """Returns the launches of a call of ``n`` sequences, with the types of their operands.

    ``max_query_len``: of a plan; None: without one.
    """
    integers = [struct(*size, dtype=jnp.int32) for size in ((n,), (n, 64), (n + 1,))]
    kv = struct(n * 64, PAGE, 2 * kv_heads, 128, dtype=dtype)
    q, new = struct(rows, heads, 128, dtype=dtype), struct(rows, kv_heads, 128, dtype=dtype)
    with compile_for(target):
        if writes:
            call, args = ragged_page_attention_v3, (q, new, new, kv, *integers)
            args += (struct(3, dtype=jnp.int32),)
        else:
            call, args = ragged_page_attention, (q, kv, *integers, struct(dtype=jnp.int32))
        plan = None
        if max_query_len is not None:
            plan = make_plan(np.ones(n), np.arange(n + 1), n, rows, max_query_len)
        program = jax.make_jaxpr(lambda *x: call(*x, plan=plan))(*args)
    return list(triton_calls.traced_launches(program.jaxpr))


@pytest.mark.parametrize(
    ("rows", "n", "reads", "writes"),
    [(1, 1, 1, 2), (8, 8, 1, 2), (4, 100, 1, 2), (16, 16, 1, 2), (16, 1, 4, 5), (64, 64, 4, 5)],
)
def test_shapes_with_a_prefill_have_launches_for_it(rows, n, reads, writes):
    """Shapes that may hold a prefill worth its own tiles have launches for it."""
    target = cuda_target(90)
    assert len(traced(rows, n, False, target)) == reads
    *_, (last, _) = updating = traced(rows, n, True, target)
    assert len(updating) == writes
    # an operand that is read twice would be copied before its memory becomes a result
    bound = last.bind(target)
    order = input_order(bound, len(last.result_types()))
    assert all(order.count(operand) == 1 for operand in bound.aliases) and len(bound.aliases) == 2


@pytest.mark.parametrize(
    ("rows", "most", "reads"), [(64, 1, 1), (1024, 4, 1), (64, 16, 1), (64, 17, 4), (1025, 1, 4)]
)
def test_launches_with_a_plan(rows, most, reads):
    """Rows of short sequences, as a plan promises them, have one launch, and one for the write."""
    for writes in (False, True):
        launches = traced(rows, rows, writes, cuda_target(90), max_query_len=most)
        assert len(launches) == reads + writes


@pytest.mark.parametrize(
    ("target", "plan"),
    [
        pytest.param(cuda_target(90), None, marks=pytest.mark.slow),
        pytest.param(rocm_target("gfx942"), None, marks=pytest.mark.slow),
        (cuda_target(90), 1),
    ],
    ids=["sm_90", "gfx942", "sm_90 with a plan"],
)
def test_compiles_without_spills(target, plan):
    rows = 8 if plan is None else 64
    for launch, avals in traced(rows, rows, True, target, max_query_len=plan):
        found = measure(launch_source(launch, avals, target), target)
        print(f"{type(launch).__name__} {target.name}: {found}")
        assert found.spills == 0 and found.shared <= target.shared_limit
