"""Latent decoding through Triton's interpreter, against a float64 oracle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels.triton import mla_decode
from ejkernel.kernels.triton.serving import merge, mla_decode_tiles
from ejkernel.kernels.triton.serving.decode_tiles import can_merge_at_end, count_work_ranges
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.problem import LatentProblem
from ejktest.drawn import wild_tables
from ejktest.oracles import paged
from ejktest.tolerance import check_close

pytest.importorskip("triton")

LENS = (37, 0, 40)


@pytest.fixture(autouse=True)
def few_programs():
    """A Hopper chip of four multiprocessors: shares hold parts of several sequences."""
    with interpret_mode(), compile_for(cuda_target(90, 4)):
        yield


def draw(lens=LENS, h=2, rows=None, latent=32, rope=8, ps=16, dtype="float32", cache=None):
    """Arguments; tables point to distinct pages and past the contexts anywhere at all."""
    rng = np.random.default_rng(0)
    kinds = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in (dtype, cache or dtype)}
    tables, pages = wild_tables(rng, lens, ps)
    shape = (len(lens), h) if rows is None else (len(lens), rows, h)
    q = rng.standard_normal((*shape, latent + rope)).astype(kinds[dtype])
    c = rng.standard_normal((pages, ps, latent + rope))
    if cache == "int8":
        c = np.clip(np.round(c * 40), -128, 127)
    return q, c.astype(kinds[cache or dtype]), np.array(lens, np.int32), tables


def expected(q, c, lens, tables, latent, **options):
    q = q if q.ndim == 4 else q[:, None]
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in (q, c)]
        options.setdefault("scale", q.shape[-1] ** -0.5)
        options = {n: np.asarray(x, np.float64) if n == "aux" else x for n, x in options.items()}
        return [np.asarray(x) for x in paged.mla_decode(*wide, lens, tables, latent, **options)]


SINKS = np.random.default_rng(7).standard_normal((2, 3)).astype(np.float32)
# shape, options, the oracle's options
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "two rows, page of three, window, one split, sinks": (
        dict(rows=2, ps=3),
        dict(sliding_window=9, num_splits=1, softmax_aux=SINKS),
        dict(left=9, aux=SINKS),
    ),
    "long page, cap, splits, negative scale, no rotary part": (
        dict(ps=128, rope=0, dtype="float16"),
        dict(logits_soft_cap=2.0, num_splits=3, softmax_scale=-0.3),
        dict(cap=2.0, scale=-0.3),
    ),
    "pages by descriptors, 20 heads": (
        dict(lens=(37, 0, 100), h=20, rope=16, ps=64, dtype="bfloat16"),
        dict(softmax_scale=-0.3),
        dict(scale=-0.3),
    ),
    "shares that begin several sequences": (
        dict(lens=(37, 0, 1, 300, 16, 33, 64, 3, 0, 130), h=1, dtype="bfloat16"),
        {},
        {},
    ),
    "int8": (dict(dtype="bfloat16", cache="int8"), dict(k_scale=0.02), dict(k_scale=0.02)),
    "e4m3, 70 heads": (
        dict(lens=(40,), h=70, dtype="bfloat16", cache="float8_e4m3fn"),
        dict(k_scale=-0.5),
        dict(k_scale=-0.5),
    ),
    "int8, pages by descriptors": (
        dict(lens=(70, 0), h=20, rope=32, ps=64, dtype="bfloat16", cache="int8"),
        dict(k_scale=0.02),
        dict(k_scale=0.02),
    ),
    "int8 as digits, cap": (
        dict(lens=(70, 0), h=3, rope=32, ps=64, dtype="bfloat16", cache="int8"),
        dict(k_scale=-0.02, logits_soft_cap=2.0),
        dict(k_scale=-0.02, cap=2.0),
    ),
    "e4m3 in quads, no scale": (
        dict(lens=(70,), h=3, rope=32, ps=64, dtype="float16", cache="float8_e4m3fn"),
        dict(),
        dict(),
    ),
    "e5m2, 40 heads, pages by descriptors": (
        dict(lens=(70,), h=40, rope=32, ps=64, dtype="bfloat16", cache="float8_e5m2"),
        dict(softmax_scale=-0.3),
        dict(scale=-0.3),
    ),
    "float32 query, e5m2": (dict(cache="float8_e5m2"), dict(k_scale=3.0), dict(k_scale=3.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_formula(name):
    shape, options, oracle_options = CASES[name]
    q, c, lens, tables = draw(**shape)
    o, lse = mla_decode(q, c, lens, tables, latent_dim=32, return_lse=True, **options)
    want, want_lse = (
        x.reshape(*q.shape[:-1], *x.shape[3:])
        for x in expected(q, c, lens, tables, 32, **oracle_options)
    )
    assert o.dtype == q.dtype and o.shape == (*q.shape[:-1], 32) and lse.dtype == jnp.float32
    check_close(np.asarray(o), want, name=name)
    check_close(np.asarray(lse), want_lse, name=name, dtype=q.dtype)
    assert not np.asarray(o, np.float32)[lens == 0].any()


def test_columns_of_many_parts_are_merged_by_several_programs():
    q, c, lens, tables = draw(lens=(70,), latent=64)
    o, lse = mla_decode(q, c, lens, tables, latent_dim=64, num_splits=70, return_lse=True)
    want, want_lse = expected(q, c, lens, tables, 64)
    check_close(np.asarray(o), want[:, 0], name="many parts")
    check_close(np.asarray(lse), want_lse[:, 0], name="many parts", dtype=q.dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_digits_of_queries_without_size():
    q, c, lens, tables = draw(lens=(70,), h=4, rope=32, ps=64, dtype="float16", cache="int8")
    q[0, 0], q[0, 1, 5], q[0, 2, 7] = 0, np.nan, np.inf
    q[0, 3] *= np.float16(3e-6)  # hardly more than 0, most of them subnormal
    o = mla_decode(q, c, lens, tables, latent_dim=32, k_scale=0.02)
    assert np.isnan(o[0, 1:3]).all()
    want = expected(q[:, [0, 3]], c, lens, tables, 32, k_scale=0.02)[0][:, 0]
    check_close(np.asarray(o[:, [0, 3]]), want, name="no size")


@pytest.mark.parametrize("logit", [2e5, 2e8])
@pytest.mark.parametrize("cache", ["int8", "float8_e4m3fn"])
def test_equal_keys_of_two_parts_weigh_the_same_however_large_their_logits(cache, logit):
    kind, value = np.dtype(getattr(ml_dtypes, cache, cache)), 96.0
    q = np.zeros((1, 3, 64), ml_dtypes.bfloat16)
    q[:, :, 32:] = 1
    c = np.zeros((2, 64, 64))
    c[..., 32:] = 64
    c[1, :, :32] = value
    args = q, c.astype(kind), np.array([70], np.int32), np.array([[0, 1]], np.int32)
    o = mla_decode(*args, latent_dim=32, num_splits=2, softmax_scale=logit / (32 * 64))
    np.testing.assert_allclose(np.asarray(o, np.float32), value * 6 / 70, rtol=2**-8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_without_context_are_zeros_whatever_the_queries(dtype):
    q, c, lens, tables = draw(lens=(0, 70), h=3, rope=32, ps=64, dtype=dtype, cache="int8")
    q[0, 0], q[0, 1] = np.nan, np.inf
    o = mla_decode(q, c, lens, tables, latent_dim=32, k_scale=0.02, num_splits=3)
    assert not np.asarray(o[0], np.float32).any() and np.isfinite(np.asarray(o, np.float32)).all()


@pytest.mark.parametrize("maps", [False, True])
def test_runs_repeat_whatever_lies_in_unseen_memory(maps):
    ps, window = (64, None) if maps else (8, 20)
    q, c, lens, tables = draw(rows=2, ps=ps, rope=16, dtype="float16")
    base = mla_decode(q, c, lens, tables, latent_dim=32, sliding_window=window)
    seen = np.zeros(c.shape[:2], bool)
    for n, row in zip(lens, tables, strict=True):
        j = np.arange(0 if maps else max(0, n - 22), n)
        seen[row[j // ps], j % ps] = True
    spoiled = np.where(seen[:, :, None], c, np.float16(np.nan))
    again = mla_decode(q, spoiled, lens, tables, latent_dim=32, sliding_window=window)
    assert np.array_equal(base, again)


def test_mapped_axes_are_more_rows():
    q, c, lens, tables = draw(lens=(20, 3))
    qs, cs = np.stack([q, 2 * q]), np.stack([c, -c])

    def run(q, c):
        return mla_decode(q, c, lens, tables, latent_dim=32, return_lse=True)

    for got, *want in zip(jax.vmap(run)(qs, cs), run(q, c), run(2 * q, -c), strict=True):
        np.testing.assert_allclose(got, np.stack(want), atol=1e-6)


def test_gradients_of_both_results():
    pytest.importorskip("ejkernel.kernels.xla")  # whose gradient it is
    q, c, lens, tables = draw(lens=(20, 0))

    def loss(function, q, c):
        o, lse = function(q, c, lens, tables, latent_dim=32, k_scale=0.5, return_lse=True)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(lens[:, None] > 0, lse, 0.0) ** 2)

    from ejkernel.ops import kernel_registry

    xla = kernel_registry.get("mla_decode", "xla")
    got = jax.grad(lambda *x: loss(mla_decode, *x), (0, 1))(q, c)
    want = jax.grad(lambda *x: loss(xla, *x), (0, 1))(q, c)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(latent=24), "latent_dim: 24 is not a power of two"),
        (dict(rope=12), "rotary part of 12"),
    ],
)
def test_what_is_refused(change, words):
    sizes = dict(latent=32, rope=8) | change
    q, c, lens, tables = draw(lens=(5,), **sizes)
    with pytest.raises(Unsupported, match=words):
        mla_decode(q, c, lens, tables, latent_dim=sizes["latent"])


def test_calls_without_work():
    q, c, lens, tables = draw(lens=(5,))
    o, lse = mla_decode(q, c, jnp.array(lens), tables[:, :0], latent_dim=32, return_lse=True)
    assert not np.asarray(o).any() and o.shape == (1, 2, 32)
    assert np.all(np.asarray(lse) == -np.inf)


# lengths, heads and other arguments, options, the reference's options
ONE_LAUNCH: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "several splits": (dict(lens=(300,), h=40, ps=64, rope=16, dtype="bfloat16"), {}, {}),
    "one tile": (dict(lens=(5,)), {}, {}),
    "no tokens": (dict(lens=(0,)), {}, {}),
    "one split": (dict(lens=(70,)), dict(num_splits=1), {}),
    "rows, window, cap, sinks": (
        dict(lens=(90,), rows=2, h=2),
        dict(sliding_window=30, logits_soft_cap=2.0, num_splits=3, softmax_aux=SINKS),
        dict(left=30, cap=2.0, aux=SINKS),
    ),
    "int8 averages": (
        dict(lens=(300,), h=3, rope=32, ps=64, dtype="bfloat16", cache="int8"),
        dict(k_scale=0.02),
        dict(k_scale=0.02),
    ),
}


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_one_launch_of_a_single_sequence(name, monkeypatch):
    """The bits of two launches, in two calls of one program; without the merge's launch."""
    shape, options, oracle_options = ONE_LAUNCH[name]
    q, c, lens, tables = draw(**shape)

    @jax.jit
    def run_twice(q):
        call = dict(latent_dim=32, return_lse=True, **options)
        first = mla_decode(q, c, lens, tables, cfg={"num_launches": 1}, **call)
        return first, mla_decode(-q, c, lens, tables, cfg={"num_launches": 1}, **call)

    call = dict(latent_dim=32, return_lse=True, **options)
    expected_bits = [
        mla_decode(x, c, lens, tables, cfg={"num_launches": 2}, **call) for x in (q, -q)
    ]
    monkeypatch.delattr(merge.PagedMerge, "outputs")  # a second launch would need them
    results = run_twice(q)
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(expected_bits), strict=True):
        np.testing.assert_array_equal(got, want)
    want, want_lse = (
        x.reshape(*q.shape[:-1], *x.shape[3:])
        for x in expected(q, c, lens, tables, 32, **oracle_options)
    )
    o, lse = results[0]
    check_close(np.asarray(o), want, name=name)
    check_close(np.asarray(lse), want_lse, name=name, dtype=q.dtype)


@pytest.mark.parametrize(
    ("change", "merges"), [({}, True), ({"batch": 2}, False), ({"heads": 4096}, False)]
)
def test_only_programs_that_run_together_wait_for_each_other(change, merges):
    sizes = {"batch": 1, "heads": 128} | change
    p = LatentProblem(
        sizes["batch"], sizes["heads"], 1, 576, 512, 64, 64, 64, *["bfloat16"] * 3, 0.1,
        KVLayout.latent(576),
    )  # fmt: skip
    target = cuda_target(90)
    chosen = mla_decode_tiles.choose(p, target)
    ranges = count_work_ranges(p, chosen, target)
    assert not can_merge_at_end(p, chosen, ranges, target)
    tiles = chosen.apply_config({"num_launches": 1}, p, target)
    assert can_merge_at_end(p, tiles, ranges, target) == merges


def test_a_short_sequence_alone_has_one_launch_where_bits_may_follow_the_batch():
    p = LatentProblem(1, 128, 1, 576, 512, 64, 64, 16, *["bfloat16"] * 3, 0.1, KVLayout.latent(576))
    chosen = mla_decode_tiles.choose(p, cuda_target(90))
    assert can_merge_at_end(
        p, chosen, count_work_ranges(p, chosen, cuda_target(90)), cuda_target(90)
    )
    assert mla_decode.fix_order(chosen).num_launches == 2
