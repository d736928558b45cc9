"""Paged decoding through Triton's interpreter, against a float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels.triton import page_attention
from ejkernel.kernels.triton.serving import decode, merge
from ejkernel.kernels.triton.serving import decode_tiles as tiles
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types import InvalidArgument
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.problem import PagedProblem
from ejktest.bound import bound
from ejktest.drawn import wild_tables
from ejktest.grids import without
from ejktest.interleaved import interleaved
from ejktest.oracles import paged
from ejktest.tolerance import check_close

pytest.importorskip("triton")

LENS = (37, 0, 5, 130, 64)


@pytest.fixture(autouse=True)
def few_programs():
    """A chip of four multiprocessors: shares hold parts of several sequences."""
    with interpret_mode(), compile_for(cuda_target(90, 4)):
        yield


def draw(lens=LENS, h=4, hk=2, d=16, dv=16, ps=16, dtype="float32", cache=None, seed=0):
    """Arguments; tables point to distinct pages and past the contexts anywhere at all."""
    rng = np.random.default_rng(seed)
    kinds = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in (dtype, cache or dtype)}
    tables, pages = wild_tables(rng, lens, ps)
    q = rng.standard_normal((len(lens), h, d)).astype(kinds[dtype])
    k, v = (rng.standard_normal((pages, ps, hk, n)) for n in (d, dv))
    if cache == "int8":
        k, v = (np.clip(np.round(x * 40), -128, 127) for x in (k, v))
    k, v = (x.astype(kinds[cache or dtype]) for x in (k, v))
    return q, k, v, np.array(lens, np.int32), tables


def expected(q, k, v, lens, tables, scale=None, **options):
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
        options = {
            n: x if n in ("left", "cap") else np.asarray(x, np.float64) for n, x in options.items()
        }
        options |= {"scale": scale or q.shape[-1] ** -0.5, "return_lse": True}
        return [np.asarray(x) for x in paged.page_attention(*wide, lens, tables, **options)]


SINKS = np.random.default_rng(7).standard_normal((4, 3)).astype(np.float32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one split": ({}, dict(num_splits=1, softmax_aux=SINKS)),
    "three splits": ({}, dict(num_splits=3, softmax_aux=SINKS)),
    "page of one, window": (dict(ps=1), dict(sliding_window=(9, 0))),
    "page of three": (dict(ps=3), {}),
    "long page, cap, sinks": (dict(ps=256), dict(logits_soft_cap=2.0, softmax_aux=SINKS[0])),
    "window cap sinks": (
        dict(ps=64),
        dict(sliding_window=40, logits_soft_cap=2.0, softmax_aux=SINKS),
    ),
    "dims 80 and 24": (dict(d=80, dv=24, dtype="bfloat16"), {}),
    "group of 20": (dict(lens=(37, 0, 150), h=20, hk=1), dict(softmax_scale=-0.3)),
    "group of 70": (dict(lens=(20,), h=70, hk=1, dtype="float16"), {}),
    "int8": (
        dict(dtype="bfloat16", cache="int8"),
        dict(k_scale=0.02, v_scale=np.array([0.02, 0.01], np.float32)),
    ),
    "e4m3": (dict(dtype="bfloat16", cache="float8_e4m3fn"), dict(k_scale=np.float32(0.5))),
    "more sequences than lanes": (dict(lens=tuple(5 * i % 17 for i in range(70)), h=2, hk=1), {}),
    "e5m2, dims 80 and 40": (
        dict(lens=(37, 0, 70), d=80, dv=40, dtype="float16", cache="float8_e5m2"),
        dict(num_splits=1, v_scale=0.5),
    ),
    "float32 query, e5m2": (dict(cache="float8_e5m2"), dict(v_scale=3.0)),
}


@pytest.mark.parametrize(
    "name",
    without(CASES, "plain", "page of three", "dims 80 and 24", "group of 20", "e4m3"),
)
def test_against_the_formula(name):
    shape, options = CASES[name]
    q, k, v, lens, tables = draw(**shape)
    return_lse = name not in ("plain", "one split")
    got = page_attention(q, k, v, lens, tables, return_lse=return_lse, **options)
    got, *lse = got if return_lse else (got,)
    names = {"sliding_window": "left", "logits_soft_cap": "cap", "softmax_aux": "aux"}
    oracle_options = {names.get(n, n): x for n, x in options.items() if n != "num_splits"}
    oracle_options["scale"] = oracle_options.pop("softmax_scale", None)
    if isinstance(oracle_options.get("left"), tuple):
        oracle_options["left"] = oracle_options["left"][0]
    assert got.dtype == q.dtype and got.shape == (*q.shape[:2], v.shape[-1])
    want, want_lse = expected(q, k, v, lens, tables, **oracle_options)
    check_close(np.asarray(got), want, name=name)
    for x in lse:
        assert x.dtype == np.float32
        check_close(np.asarray(x), want_lse, dtype=q.dtype, name="lse")
    assert not np.asarray(got, np.float32)[lens == 0].any()


# lengths, heads and other arguments, options, the reference's options
ONE_LAUNCH: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "several splits": (dict(lens=(300,), h=8, dtype="bfloat16"), {}, {}),
    "no tokens": (dict(lens=(0,)), {}, {}),
    "one split": (dict(lens=(70,)), dict(num_splits=1), {}),
    "window, cap, sinks": (
        dict(lens=(150,), d=24, dv=40),
        dict(sliding_window=70, logits_soft_cap=2.0, num_splits=3, softmax_aux=SINKS),
        dict(left=70, cap=2.0, aux=SINKS),
    ),
    "int8": (
        dict(lens=(200,), h=6, dtype="bfloat16", cache="int8"),
        dict(k_scale=0.02, v_scale=0.5),
        dict(k_scale=0.02, v_scale=0.5),
    ),
}


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_one_launch_of_a_single_sequence(name, monkeypatch):
    """The last program merges, in whatever order programs end: the same bits, no second launch."""
    shape, options, reference = ONE_LAUNCH[name]
    q, k, v, lens, tables = draw(**shape)
    want = expected(q, k, v, lens, tables, **reference)
    monkeypatch.delattr(merge.PagedMerge, "outputs")  # a second launch would need them
    call = dict(return_lse=True, cfg={"num_launches": 1}, **options)
    results = page_attention(q, k, v, lens, tables, **call)
    for got, exact in zip(results, want, strict=True):
        check_close(np.asarray(got), exact, name=name, dtype=q.dtype)
    for seed in range(2):
        with interleaved(seed):
            for got, first in zip(
                page_attention(q, k, v, lens, tables, **call), results, strict=True
            ):
                np.testing.assert_array_equal(got, first)


@pytest.mark.parametrize("polls", [0, 2, 10**6])
def test_programs_that_wait_for_each_other_merge_once_all_have_finished(polls, monkeypatch):
    """They have the bits of the second launch, whether they wait long enough or give up."""
    q, k, v, lens, tables = draw(lens=(300,), h=4, dtype="bfloat16")
    expected_bits = page_attention(q, k, v, lens, tables, return_lse=True, num_splits=4)
    choose = page_attention.choose

    def all_merge(*problem):
        return replace(choose(*problem), last_merges=False)

    monkeypatch.setattr(type(page_attention), "choose", staticmethod(all_merge))
    merged = decode.PagedSplit.merge_tile
    waiting = {"merge_tile": lambda self: (x := merged(self)) and x._replace(POLLS=polls)}
    waiting["interpreter_arguments"] = lambda self, target: {"PTX": 0}
    for attribute, value in waiting.items():
        monkeypatch.setattr(decode.PagedSplit, attribute, value)
    cfg = {"num_launches": 1}
    for seed in range(2):
        with interleaved(seed):
            results = page_attention(q, k, v, lens, tables, return_lse=True, num_splits=4, cfg=cfg)
        for got, want in zip(results, expected_bits, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "merges_in_last"), [(32, 8, True), (64, 1, False), (64, 8, True)]
)
def test_the_last_program_merges_few_rows(heads, kv_heads, merges_in_last):
    """It needs no program to run next to another one."""
    p, target = problem_of(1, heads, kv_heads, 128, 10000, 16, 8192), cuda_target(90)
    chosen = tiles.choose(p, target)
    assert (chosen.num_launches, chosen.last_merges) == (2, merges_in_last)
    assert page_attention.fix_order(replace(chosen, num_launches=1)).num_launches == 2
    tiles_of_one = chosen.apply_config({"num_launches": 1}, p, target)
    many = 10 * target.cores
    assert tiles.can_merge_at_end(p, tiles_of_one, many, target) == merges_in_last
    short = replace(p, max_pages=tiles.SHORT_TOKENS // 16)
    assert tiles.choose(short, target).num_launches == (1 if merges_in_last else 2)
    assert tiles.choose(replace(short, batch=2), target).num_launches == 2
    assert not tiles.can_merge_at_end(replace(p, batch=2), tiles_of_one, many, target)


def test_few_steps_of_a_program_where_the_last_one_merges():
    target = cuda_target(90)
    for pages, ranges in ((64, 16), (512, 32), (8192, 33)):
        p = problem_of(1, 32, 8, 128, 10000, 16, pages)
        tiles_of_one = tiles.choose(p, target).apply_config({"num_launches": 1}, p, target)
        assert tiles.count_work_ranges(p, tiles_of_one, target) == ranges


def problem_of(batch, heads, kv_heads, dim, pages, page_size, max_pages):
    layout = KVLayout.separate(kv_heads, dim, dim)
    sizes = (batch, heads, kv_heads, dim, dim, pages, page_size, max_pages)
    return PagedProblem(*sizes, *["bfloat16"] * 3, 0.125, layout)


def test_no_more_splits_than_tokens():
    problem = problem_of(1, 4, 2, 64, 3, 16, 3)
    target = cuda_target(90)
    chosen = tiles.choose(problem, target)
    assert chosen.apply_config(None, replace(problem, num_splits=10**12), target).splits == 3 * 16
    assert chosen.apply_config({"num_splits": 2}, problem, target).splits == 2
    assert chosen.apply_config({"num_splits": 10**12}, problem, target).splits == 3


@pytest.mark.parametrize(("pages", "size", "block"), [(3, 16, 64), (10**6, 16, 512)])
def test_no_longer_steps_than_sequences(pages, size, block):
    problem = problem_of(1, 4, 2, 64, pages, size, pages)
    target = cuda_target(90)
    for cfg in ({"pages_per_block": 2**20}, {"pages_per_block": 10**30}):
        assert tiles.choose(problem, target).apply_config(cfg, problem, target).block == block
    few = tiles.choose(problem, target).apply_config({"pages_per_block": 2}, problem, target)
    assert few.block == 32


def test_config_and_splits_change_rounding_only_and_runs_repeat():
    args = draw(lens=(200, 16, 90))
    base = np.asarray(page_attention(*args))
    assert np.array_equal(base, page_attention(*args))
    for options in (
        dict(cfg=dict(num_splits=2, num_warps=2)),
        dict(cfg=SimpleNamespace(pages_per_block=3), num_splits=7),
    ):
        np.testing.assert_allclose(page_attention(*args, **options), base, atol=1e-6)


def test_unseen_memory_and_wild_entries_have_no_effect():
    q, k, v, lens, tables = draw(ps=8)
    base = page_attention(q, k, v, lens, tables, sliding_window=20)
    seen = np.zeros(k.shape[:2], bool)
    for n, row in zip(lens, tables, strict=True):
        j = np.arange(max(0, n - 21), n)
        seen[row[j // 8], j % 8] = True
    for bad in (np.nan, np.inf):
        spoiled = [np.where(seen[:, :, None, None], x, np.float32(bad)) for x in (k, v)]
        again = page_attention(q, *spoiled, lens, tables, sliding_window=20)
        assert np.array_equal(base, again)


def test_nan_that_a_sequence_sees_is_in_its_output_and_lse():
    q, k, v, lens, tables = draw()
    k[tables[3, 0], 5] = np.nan
    for splits in (1, 3):
        with np.errstate(invalid="ignore"):  # the interpreter computes in numpy
            results = page_attention(q, k, v, lens, tables, num_splits=splits, return_lse=True)
        for x in results:
            rows = np.isnan(x).reshape(len(lens), -1)
            assert rows[3].all() and not np.delete(rows, 3, axis=0).any()


def test_lengths_beyond_the_table_and_ranks():
    q, k, v, lens, tables = draw(lens=(32, 16))
    long = page_attention(q[:, None], k, v, jnp.asarray(lens) + jnp.array([1000, 0]), tables)
    assert long.shape == (2, 1, 4, 16)
    assert np.array_equal(long[:, 0], page_attention(q, k, v, lens, tables))
    negative = page_attention(q, k, v, jnp.array([-5, 16]), tables)
    assert not np.asarray(negative)[0].any()


@pytest.mark.parametrize(
    ("cache", "capability"), [("int8", 90), ("float8_e4m3fn", 90), ("float8_e4m3fn", 80),
                              ("float8_e5m2", 90)]
)  # fmt: skip
def test_every_8_bit_number_is_read_exactly(cache, capability):
    kind = np.dtype(getattr(ml_dtypes, cache, cache))
    codes = np.arange(256, dtype=np.uint8).view(kind)
    values = codes.astype(np.float32)
    codes = np.where(np.isfinite(values), codes, np.zeros_like(codes))
    v = codes.reshape(16, 1, 1, 16)
    q, lens = np.ones((16, 1, 16), np.float32), np.ones(16, np.int32)
    with compile_for(cuda_target(capability, 4)):
        got = page_attention(
            q.astype(ml_dtypes.bfloat16), np.zeros_like(v), v, lens, np.arange(16)[:, None],
            num_splits=1,
        )  # fmt: skip
    want = np.where(np.isfinite(values), values, 0.0)
    assert np.array_equal(np.asarray(got, np.float32).ravel(), want)


@pytest.mark.parametrize(("keys", "values"), [("int8", "bfloat16"), ("bfloat16", "float8_e4m3fn")])
def test_caches_of_two_dtypes(keys, values):
    q, k, _, lens, tables = draw(lens=(37, 0, 20), dtype="bfloat16", cache=keys)
    v = draw(lens=(37, 0, 20), dtype="bfloat16", cache=values, seed=1)[2]
    got = page_attention(q, k, v, lens, tables, k_scale=0.02)
    check_close(np.asarray(got), expected(q, k, v, lens, tables, k_scale=0.02)[0])


def test_a_float8_nan_is_one():
    q, k, v, lens, tables = draw(lens=(5, 3), dtype="bfloat16", cache="float8_e4m3fn")
    v[tables[0, 0], 2, 1, 3] = np.nan
    got = np.asarray(page_attention(q, k, v, lens, tables), np.float32)
    assert np.isnan(got[0, 2:, 3]).all()
    assert np.isnan(got).sum() == 2


def test_queries_of_any_size_with_8_bit_caches():
    q, k, v, lens, tables = draw(lens=(30, 9), dtype="bfloat16", cache="int8")
    want = np.asarray(page_attention(q, k, v, lens, tables, k_scale=0.02), np.float32)
    for power in (2.0**100, 2.0**-60):
        big = (q.astype(np.float32) * power).astype(q.dtype)
        got = page_attention(big, k, v, lens, tables, k_scale=0.02, softmax_scale=0.25 / power)
        assert np.array_equal(np.asarray(got, np.float32), want)


def test_vmap_joins_the_batch():
    first, second = (draw(lens=(30, 0, 150), ps=8, seed=n) for n in (1, 2))
    both = [np.stack(x) for x in zip(first, second, strict=True)]
    aux = np.stack([SINKS, SINKS + 1])

    def f(q, k, v, lens, tables, aux):
        return page_attention(q, k, v, lens, tables, softmax_aux=aux, k_scale=0.5)

    want = [f(*first, SINKS), f(*second, SINKS + 1)]
    np.testing.assert_allclose(jax.vmap(f)(*both, aux), np.stack(want), atol=1e-6)
    shared = jax.vmap(f, (0, None, None, None, None, None))(both[0], *first[1:], SINKS)
    np.testing.assert_allclose(shared[0], want[0], atol=1e-6)
    keys_only = jax.vmap(f, (None, 0, None, None, None, None))(first[0], both[1], *first[2:], SINKS)
    np.testing.assert_allclose(keys_only[0], want[0], atol=1e-6)


def test_gradients_are_those_of_xla():
    xla = pytest.importorskip("ejkernel.kernels.xla")
    q, k, v, lens, tables = draw(lens=(20, 0, 9), ps=8)

    def total(fn):
        def f(q, k, v, aux, scale):
            o = fn(
                q, k, v, lens, tables, softmax_aux=aux, v_scale=scale, logits_soft_cap=5.0,
                sliding_window=(11, 0), cfg=None,
            )  # fmt: skip
            return jnp.sum(jnp.sin(o))

        return jax.jit(jax.grad(f, (0, 1, 2, 3, 4)))(q, k, v, SINKS, jnp.float32(0.5))

    for a, b in zip(total(page_attention), total(xla.page_attention), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_refusals_and_errors():
    q, k, v, lens, tables = draw()
    a = dict(query=q, key_cache=k, value_cache=v, context_lens=lens, block_tables=tables)

    def refusal(**change):
        with jax.enable_x64(True):
            problem = page_attention.problem(bound(page_attention.call, **a | change).arguments)
        return page_attention.unsupported_reason(problem, cuda_target(90))

    assert refusal() is None
    assert refusal(query=q.astype(np.float64)).startswith("query: float64")
    assert refusal(value_cache=np.zeros((*v.shape[:3], 264), v.dtype)).startswith("value_cache:")
    with pytest.raises(InvalidArgument, match="key_cache"):
        page_attention(q, k.astype(np.int16), v, lens, tables)
    with pytest.raises(InvalidArgument, match="context_lens"):
        page_attention(q, k, v, lens[:2], tables)
    with pytest.raises(InvalidArgument, match="block_tables"):
        page_attention(q, k, v, lens, tables.astype(np.float32))
    with pytest.raises(ValueError, match="num_splits"):
        page_attention(q, k, v, lens, tables, num_splits=0)


def test_the_grid_depends_on_shapes_and_chip_only():
    problem = problem_of(64, 32, 8, 128, 9, 16, 512)
    target = cuda_target(90)
    launch = tiles.choose(problem, target)
    ranges = tiles.count_work_ranges(problem, launch, target)
    # two programs on every multiprocessor, all running at once
    assert ranges * 8 == 132 * launch.programs_per_core == 264
    shared = tiles.shared_bytes(problem, launch.block, launch.num_stages)
    assert launch.programs_per_core * shared <= target.shared_limit
