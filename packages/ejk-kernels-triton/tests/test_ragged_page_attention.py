"""Ragged attention over pages through Triton's interpreter, against a float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types.serving.schedule import (
    DecodeRow,
    LongPrefill,
    RaggedSchedule,
    ScheduleHeader,
    ScheduleSizes,
    SequenceWork,
    WorkTile,
    columns_of,
    ragged_schedule,
)
from ejktest import triton_calls
from ejktest.bound import bound, struct
from ejktest.grids import without
from ejktest.oracles import paged
from ejktest.tolerance import check_close

pytest.importorskip("triton")

from ejkernel.kernels.triton import ragged_page_attention, ragged_page_attention_v3
from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.serving import launch, schedule
from ejkernel.kernels.triton.serving import ragged_tiles as tiles


@pytest.fixture(autouse=True)
def few_programs():
    with interpret_mode(), compile_for(cuda_target(90, 2)):
        yield


def kind(name):
    return np.dtype(getattr(ml_dtypes, name, name))


# decoding, nothing, two tiles of a prefill, a few rows, the first tokens of a sequence
ROWS, LENS = (1, 0, 18, 3, 10), (37, 5, 40, 60, 10)


def draw(rows=ROWS, lens=LENS, h=4, hk=2, d=16, ps=16, dtype="float32", cache=None, tail=3, seed=0):
    """Arguments; wild entries past the contexts, a sequence that is not valid, rows of none."""
    rng = np.random.default_rng(seed)
    cache = cache or dtype
    n, columns = len(lens), max(-(-x // ps) for x in lens)
    pages = n * columns + 2
    tables = rng.permutation(pages)[: n * columns].reshape(n, columns).astype(np.int32)
    for row, x in zip(tables, lens, strict=True):
        row[-(-x // ps) :] = rng.choice([-1, pages, 2**31 - 1, -(2**31)])
    tables = np.concatenate([tables, np.full((1, columns), -7, np.int32)])
    starts = np.concatenate([np.cumsum([0, *rows]), [2]]).astype(np.int32)
    q = rng.standard_normal((sum(rows) + tail, h, d)).astype(kind(dtype))
    kv = rng.standard_normal((pages, ps, 2 * hk, d))
    kv = np.clip(np.round(kv * 40), -128, 127) if cache == "int8" else kv
    lens = np.array([*lens, 9], np.int32)
    return q, kv.astype(kind(cache)), lens, tables, starts, np.array(n)


def expected(q, kv, lens, tables, starts, count, scale=None, **options):
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in (q, kv)]
        hk = kv.shape[2] // 2
        for name in ("k_scale", "v_scale"):
            if name in options:
                options[name] = np.float64(options[name]) * np.ones(hk)
        if "aux" in options:
            options["aux"] = np.asarray(options["aux"], np.float64)
        scale = scale or q.shape[-1] ** -0.5
        out = paged.ragged_page_attention(
            *wide, lens, tables, starts, int(count), scale=scale, **options
        )
        return jax.tree.map(np.asarray, out)


SINKS = np.random.default_rng(7).standard_normal((4, 3)).astype(np.float32)
SMALL = dict(num_queries_per_block=8)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, dict(cfg=SMALL)),
    "window, page of three": (dict(ps=3), dict(sliding_window=(9, 0), cfg=SMALL)),
    "window cap sinks": (
        dict(dtype="bfloat16", ps=64),
        dict(sliding_window=30, logits_soft_cap=2.0, softmax_aux=SINKS, cfg=SMALL),
    ),
    "pages by descriptor": (dict(dtype="bfloat16", ps=64, lens=(37, 5, 140, 60, 10)), {}),
    "group of 3, dim 24": (
        dict(h=3, hk=1, d=24),
        dict(softmax_scale=-0.3, k_scale=0.5, v_scale=np.float32(2.0), softmax_aux=SINKS[0]),
    ),
    "group of 20": (dict(rows=(1, 4), lens=(20, 9), h=20, hk=1, dtype="float16"), {}),
}
NAMES = {"sliding_window": "left", "logits_soft_cap": "cap", "softmax_aux": "aux",
         "softmax_scale": "scale"}  # fmt: skip


@pytest.mark.parametrize("name", without(CASES, "plain", "group of 20"))
def test_against_the_formula(name):
    shape, options = CASES[name]
    args = draw(**shape)
    return_lse = name != "plain"
    got = ragged_page_attention(*args, return_lse=return_lse, **options)
    got, *lse = got if return_lse else (got,)
    oracle_options = {NAMES.get(n, n): x for n, x in options.items() if n != "cfg"}
    if isinstance(oracle_options.get("left"), tuple):
        oracle_options["left"] = oracle_options["left"][0]
    assert got.dtype == args[0].dtype and got.shape == args[0].shape
    want, want_lse = expected(*args, return_lse=True, **oracle_options)
    check_close(np.asarray(got), want, name=name)
    for x in lse:
        assert x.dtype == np.float32
        check_close(np.asarray(x), want_lse, dtype=got.dtype, name="lse")
    assert not np.asarray(got, np.float32)[args[4][int(args[5])] :].any()


def sevens(work, arrays):
    """A stage whose output is 7 in the rows of its sequences, and unset in all others."""
    q, tile = arrays["q"], WorkTile(*arrays["work_tiles"].T)
    single = DecodeRow(*arrays["decode_rows"].T)
    row = jnp.arange(q.shape[0])[:, None]
    mine = jnp.any((row >= tile.first_row) & (row < tile.end_row) & (tile.tiles > 0), axis=1)
    mine |= jnp.any((row == single.row) & (single.kv_len > 0), axis=1)
    return {"o": jnp.where(mine[:, None, None], 7.0, jnp.nan).astype(q.dtype) + 0 * q}


@pytest.mark.parametrize(
    "min_rows, min_total_rows, single_len, given",
    [
        (10, 28, 37, (2, 4)),  # the single row would take longer than all others
        (10, 28, 3, (0, 2, 4)),
        (18, 19, 3, ()),
    ],
)
def test_a_stage_of_another_kernel_may_have_long_prefill(
    min_rows, min_total_rows, single_len, given
):
    class Kernel(type(ragged_page_attention)):
        stages: ClassVar = {**ragged_page_attention.stages, "long_prefill": sevens}

        def choose(self, problem, target):
            long = LongPrefill(min_rows, min_total_rows, 16, 8, decodes=True)
            return replace(super().choose(problem, target), long_prefill=long)

    args = draw(lens=(single_len, *LENS[1:]))
    want, starts = np.array(expected(*args)), args[4]
    for i in given:
        want[starts[i] : starts[i + 1]] = 7.0
    check_close(np.asarray(Kernel()(*args, cfg=SMALL)), want)


MIXES = {  # rows, multiprocessors
    "long": ((1, 300, 128, 0, 129), 2),
    "few": ((7, 5), 2),
    "one long": ((1, 1024, 1), 2),
    "many": ((*[1] * 70, *range(130, 195), 1), 2),
    "split": ((9, 1, 2, 0, 17, 1), 64),
}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", MIXES)
def test_schedule_is_that_of_the_reference(name, window):
    (rows, cores), h, hk, d = MIXES[name], 12, 6, 8
    n = len(rows)
    starts = np.cumsum([3, *rows]).astype(np.int32)
    lens = np.asarray([m + 160 * (i % 7) for i, m in enumerate(rows)], np.int32)
    args = {
        "queries": struct(sum(rows) + 9, h, d), "kv_pages": struct(9, 16, 2 * hk, d),
        "block_tables": struct(n, 200, dtype=jnp.int32), "context_lens": lens,
        "softmax_scale": 1.0, "sliding_window": window and (window, 0), "logits_soft_cap": None,
    }  # fmt: skip
    problem, target = ragged_page_attention.problem(args), cuda_target(90, cores)
    long = LongPrefill(128, 256, 128, 128, decodes=True)
    t = replace(tiles.choose(problem, target), long_prefill=long, rows=16, min_split_keys=64)
    operands = starts, lens, np.asarray([n - 1], np.int32)
    launch = schedule.RaggedScheduleLaunch(problem, t, target)
    with compile_for(target):
        tables = call(launch, **dict(zip(("starts", "lens", "valid"), operands, strict=True)))
    *found, _, work_tiles, decode_rows = map(np.asarray, tables.values())
    found = RaggedSchedule(*found, work_tiles, decode_rows)
    sizes = ScheduleSizes(
        problem.rows, problem.paged.capacity, h, hk, t.block, t.tile, t.decode_tokens,
        launch.max_split_units, -(-t.min_split_keys // t.block), target.cores,
        schedule.L2_BYTES // problem.paged.token_bytes, window, long,
    )  # fmt: skip
    want = ragged_schedule(starts, lens, n - 1, sizes)
    for table, x, y in zip(want._fields, found, want, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=table)
    has_long = sum(m for m in rows[:-1] if m >= 128) >= 256
    assert bool(want.header[columns_of(ScheduleHeader).prefill_decodes]) == has_long
    assert (want.decode_rows[:, columns_of(DecodeRow).programs] > 0).all() == has_long
    split = want.sequences[columns_of(SequenceWork).splits] > 1
    assert name != "split" or split.any()


def drawn_rows(args, hk=2, dtype="float32", seed=1):
    rng = np.random.default_rng(seed)
    shape = (args[0].shape[0], hk, args[0].shape[2])
    return [rng.standard_normal(shape).astype(kind(dtype)) for _ in "kv"]


def stored(x, scale, dtype):
    """``x`` as a cache of this dtype holds it."""
    if x.dtype == dtype:
        return x
    y = x.astype(np.float32) / np.float32(1 if scale is None else scale).reshape(-1, 1)
    y = np.rint(y) if dtype == np.int8 else y
    info = np.iinfo(dtype) if dtype == np.int8 else ml_dtypes.finfo(dtype)
    return np.clip(y, float(info.min), float(info.max)).astype(dtype)


def packed(kv):
    """The packed form; what fills it up is 7."""
    per = 4 // kv.itemsize
    groups, d = -(-kv.shape[2] // per), -(-kv.shape[3] // 128) * 128
    out = np.full((*kv.shape[:2], groups * per, d), 7, kv.dtype)
    out[:, :, : kv.shape[2], : kv.shape[3]] = kv
    return out.reshape(*kv.shape[:2], groups, per, d)


WRITES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16 packed, h 3": (dict(dtype="bfloat16", h=3, hk=3, ps=3), dict(sliding_window=12)),
    "int8 packed": (dict(dtype="bfloat16", cache="int8"), dict(k_scale=0.02, v_scale=[0.02, 0.03])),
    "e4m3": (dict(dtype="bfloat16", cache="float8_e4m3fn"), dict(k_scale=0.5, q_scale=0.25)),
    "e5m2 packed": (dict(dtype="float16", cache="float8_e5m2", ps=5), dict(v_scale=2.0)),
}


@pytest.mark.parametrize("name", without(WRITES, "e4m3"))
def test_write_then_attend(name):
    shape, options = WRITES[name]
    q, kv, lens, tables, starts, count = args = draw(**shape)
    hk = kv.shape[2] // 2
    keys, values = drawn_rows(args, hk, shape.get("dtype", "float32"))
    options = {n: np.float32(x) if "scale" in n else x for n, x in options.items()}
    cache = packed(kv) if "packed" in name else kv
    flat = tables.reshape(-1) if "packed" in name else tables
    out, *lse, new = ragged_page_attention_v3(
        q, keys, values, cache, lens, flat, starts, np.array([1, 2, count]),
        return_lse=name == "e4m3", **options,
    )  # fmt: skip
    k, v = (stored(x, options.get(f"{n}_scale"), kv.dtype) for n, x in (("k", keys), ("v", values)))
    with jax.enable_x64(True):
        wide = [jnp.asarray(x.astype(np.float64)) for x in (kv, k, v)]
        want = np.asarray(paged.write_pages(*wide, lens, tables, starts, int(count)))
    want = want.astype(np.float32).astype(kv.dtype)
    # to the bit, and what nobody writes stays as it was
    np.testing.assert_array_equal(
        np.asarray(new).view(np.uint8), (packed(want) if "packed" in name else want).view(np.uint8)
    )
    oracle_options = {NAMES.get(n, n): x for n, x in options.items()}
    if "q_scale" in oracle_options:
        oracle_options["scale"] = q.shape[-1] ** -0.5 * oracle_options["q_scale"]
        q = stored(q, oracle_options.pop("q_scale"), kv.dtype).astype(q.dtype)
    want, want_lse = expected(q, want, *args[2:], return_lse=True, **oracle_options)
    check_close(np.asarray(out), want, name=name)
    for x in lse:
        check_close(np.asarray(x), want_lse, dtype=q.dtype, name="lse")


def test_a_step_of_decoding_is_merged_by_programs_that_all_run_at_once():
    n, page, card = 64, 16, cuda_target(90, 132)
    integers = [struct(*size, dtype=jnp.int32) for size in ((n,), (n, 8), (n + 1,), ())]
    args = (struct(n, 32, 128), struct(n * 8, page, 16, 128), *integers)
    with compile_for(card):
        program = jax.make_jaxpr(lambda *x: ragged_page_attention(*x))(*args)
    kinds = [launch for launch, _ in triton_calls.traced_launches(program.jaxpr)]
    assert len(kinds) == 4
    merge = kinds[-1].bind(card)
    # 64 warps fit a multiprocessor; no program loads many more parts than a row has
    assert (
        merge.grid[0] * merge.options["num_warps"] <= 132 * 64
        and merge.arguments["tile"].PARTS == 4
    )


def test_long_walks_are_cut_into_parts(monkeypatch):
    """Few tiles and long contexts: their keys are shared out, and merged."""
    args = draw(rows=(2, 0, 11, 9), lens=(30, 9, 120, 100), d=24, ps=8)
    options = dict(softmax_aux=SINKS, v_scale=0.5)
    full_out = np.asarray(ragged_page_attention(*args, **options))
    monkeypatch.setattr(tiles, "MIN_SPLIT_KEYS", 32)
    monkeypatch.setattr(launch, "MAX_LANES", 2)  # several looks at the sequences
    cfg = dict(num_kv_pages_per_block=2, num_splits=3)
    cut, lse = map(np.asarray, ragged_page_attention(*args, cfg=cfg, return_lse=True, **options))
    assert not np.array_equal(cut, full_out)
    np.testing.assert_allclose(cut, full_out, atol=1e-5)
    want, want_lse = expected(*args, aux=SINKS, v_scale=0.5, return_lse=True)
    check_close(cut, want)
    check_close(lse, want_lse, name="lse")


@pytest.mark.parametrize(
    ("ps", "dtype", "window"), [(8, "float32", 10), (64, "bfloat16", None)], ids=["8", "mapped 64"]
)
def test_unseen_memory_has_no_effect(ps, dtype, window):
    args = draw(rows=(1, 12, 3), lens=(37, 30, 150), ps=ps, dtype=dtype)
    q, kv, lens, tables, starts, count = args
    base = np.asarray(ragged_page_attention(*args, sliding_window=window))
    seen = np.zeros(kv.shape[:2], bool)
    for r in range(int(count)):
        rows = starts[r + 1] - starts[r]
        j = np.arange(max(0, lens[r] - rows - window) if window else 0, lens[r])
        seen[tables[r, j // ps], j % ps] = True
    spoiled = np.where(seen[:, :, None, None], kv, np.array(np.nan, kv.dtype))
    again = ragged_page_attention(q, spoiled, *args[2:], sliding_window=window)
    np.testing.assert_array_equal(base, again)


def test_traced_nonsense_is_safe():
    """Starts out of order, lengths beyond the table or below the rows, pages that are none."""
    q, kv, _, tables, _, _ = draw(rows=(12, 3, 9), lens=(20, 30, 25), tail=2)
    keys, values = drawn_rows((q,))
    starts = np.array([1, 15, 9, 40, 2**31 - 1], np.int32)  # rows 1 to 15, then 15 to the end
    lens, tables = np.array([1000, -5, 7, 99], np.int32), tables - 30
    call = jax.jit(ragged_page_attention_v3)
    out, cache = call(q, keys, values, kv, lens, tables, starts, np.array([0, 0, 3]))
    out = np.asarray(out)
    assert np.isfinite(out).all() and np.isfinite(np.asarray(cache)).all()
    # no sequence; before the keys of a sequence of 7 tokens
    assert not out[0].any() and not out[15 : 26 - 7].any() and out[1].any() and out[-1].any()
    none = jax.jit(ragged_page_attention)(q, kv, lens, tables, starts, np.array(-3))
    assert not np.asarray(none).any()


def test_mapped_calls_and_gradients_are_those_of_xla():
    xla = pytest.importorskip("ejkernel.kernels.xla")
    q, kv, lens, tables, starts, count = draw(rows=(1, 4), lens=(9, 6), ps=4, h=2, hk=1, tail=1)
    keys, values = drawn_rows((q,), 1)
    queries = np.stack([q, -q])

    def total(fn):
        def f(q, keys, kv, aux, scale):
            def one(q):
                return fn(
                    q, keys, values, kv, lens, tables, starts, np.array([0, 0, count]), aux,
                    k_scale=scale, cfg=None,
                )  # fmt: skip

            out, cache = jax.vmap(one)(q)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(cache))

        value = jax.jit(jax.value_and_grad(f, (0, 1, 2, 3, 4)))
        return value(queries, keys, kv, SINKS[:2], jnp.float32(0.5))

    ours, theirs = total(ragged_page_attention_v3), total(xla.ragged_page_attention_v3)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_gradients_beside_an_8_bit_cache():
    pytest.importorskip("ejkernel.kernels.xla")  # whose gradient it is
    q, kv, *lengths, count = draw(rows=(1,), lens=(5,), dtype="bfloat16", cache="int8", tail=0)
    keys, values = drawn_rows((q,))

    def f(q):
        out, _ = ragged_page_attention_v3(
            q, keys, values, kv, *lengths, np.array([0, 0, count]), k_scale=0.02, v_scale=0.02
        )
        return out.astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(f))(q)
    assert grad.dtype == q.dtype and np.isfinite(np.asarray(grad, np.float32)).all()


def test_unsupported_calls_are_refused():
    q, kv, lens, tables, starts, count = draw(rows=(1,), lens=(5,))
    given = dict(queries=q, kv_pages=kv, context_lens=lens, block_tables=tables,
                 query_start_loc=starts, num_seqs=count)  # fmt: skip

    def refusal(**change):
        with jax.enable_x64(True):
            call = bound(ragged_page_attention.call, **given | change)
            problem = ragged_page_attention.problem(call.arguments)
        return ragged_page_attention.unsupported_reason(problem, cuda_target(90))

    assert refusal() is None
    assert refusal(queries=q.astype(np.float64)).startswith("queries: float64")
    assert refusal(kv_pages=kv.astype(np.float64)).startswith("kv_pages: float64")
    wide = refusal(queries=np.zeros((4, 4, 264)), kv_pages=np.zeros((3, 16, 4, 264), np.float32))
    assert wide.startswith("queries")
    large = refusal(kv_pages=jax.ShapeDtypeStruct((2**27, *kv.shape[1:]), kv.dtype))
    assert large == f"kv_pages: {2**27} pages of 16 are not less than 2^31 tokens"
    empty = ragged_page_attention(q, kv, jnp.array(lens), tables[:, :0], starts, count)
    assert empty.shape == q.shape and not np.asarray(empty).any()
