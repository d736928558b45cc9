"""Ragged attention over pages in Pallas' TPU interpreter, against the float64 oracle.

Memory that nobody wrote is NaN, pages hold NaN where no context reaches, and races are found.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import get_chip, interpreter
from ejkernel.kernels.pallas.tpu.ragged_page_attention import tiles
from ejkernel.kernels.pallas.tpu.ragged_page_attention.implementation import (
    ragged_page_attention,
    ragged_page_attention_v3,
)
from ejkernel.types.arrays import quantise
from ejktest.bound import bound
from ejktest.cases.paged import in_context
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.drawn import grow_tree, wild_tables
from ejktest.grids import cover
from ejktest.oracles import paged
from ejktest.tolerance import check_close

PARAMS = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
# single rows, no rows, a block of queries with and without full blocks of keys, a short context
ROWS = (1, 0, 20, 1, 3, 0)
LENS = (140, 7, 300, 1, 2, 9)
FIRST, TAIL = 2, 3  # rows of no sequence at both ends


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(PARAMS):
        yield


def draw(h=4, hk=2, d=128, ps=16, dtype="float32", cache=None, rows=ROWS, lens=LENS):
    """Queries, new keys and values, a cache, lengths, tables and starts."""
    rng = np.random.default_rng(0)
    tables, pages = wild_tables(rng, lens, ps)
    starts = np.cumsum([FIRST, *rows]).astype(np.int32)
    shape = (starts[-1] + TAIL, h, d)
    q = rng.standard_normal(shape).astype(jnp.dtype(dtype))
    keys, values = (rng.standard_normal((shape[0], hk, d)).astype(q.dtype) for _ in range(2))
    pool = rng.standard_normal((pages, ps, 2 * hk, d))
    if cache == "int8":
        pool = np.clip(np.round(pool * 40), -128, 127)
    else:
        pool = np.where(in_context(lens, tables, pages, ps)[..., None, None], pool, np.nan)
    return q, keys, values, pool.astype(jnp.dtype(cache or dtype)), tables, starts


def expected(q, pool, tables, starts, lens=LENS, **options):
    names = {"sliding_window": "left", "logits_soft_cap": "cap", "softmax_aux": "aux"}
    options = {names.get(n, n): x for n, x in options.items() if n != "cfg"}
    of_trees = {"tree_mask", "positions", "window"}
    for name in options.keys() - {"left", "cap", "return_lse"} - of_trees:
        options[name] = np.asarray(options[name], np.float64)
    with jax.enable_x64(True):
        wide = [np.nan_to_num(np.asarray(x).astype(np.float64)) for x in (q, pool)]
        o = paged.ragged_page_attention(
            *wide, lens, tables, starts, len(lens), scale=q.shape[-1] ** -0.5, **options
        )
        return [np.asarray(x) for x in o] if "return_lse" in options else [np.asarray(o)]


SINKS = np.random.default_rng(7).standard_normal((4, 3)).astype(np.float32)
CFG = {"num_kv_pages_per_block": 8, "num_queries_per_block": 16}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({}, {}),
    "bfloat16, window, cap, sinks, lse": (
        dict(dtype="bfloat16"),
        dict(return_lse=True, sliding_window=40, logits_soft_cap=2.0, softmax_aux=SINKS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reads_pages(name):
    shape, options = CASES[name]
    q, _, _, pool, tables, starts = draw(**shape)

    def run(*arrays):
        return ragged_page_attention(*arrays, len(ROWS), cfg=CFG, **options)

    results = jax.jit(run)(q, pool, np.array(LENS, np.int32), tables, starts)
    # at once: XLA's threads are few, and the interpreter needs one while the reference runs
    results = [np.asarray(x) for x in jax.tree.leaves(results)]
    reference = expected(q, pool, tables, starts, **options)
    assert results[0].dtype == q.dtype
    for got, want in zip(results, reference, strict=True):
        check_close(got, want, name=name)
    assert not results[0][:FIRST].any() and not results[0][-TAIL:].any()
    assert_no_races()


# a chain and a branching tree of several blocks of queries, a short context, the end of a block
TREES = (1, 0, 20, 40, 3, 6, 17), (140, 7, 300, 61, 2, 128, 130)


def grow_trees(rows, lens, *, chains=()):
    """Returns the mask of the new tokens and their positions; ``chains`` are causal sequences."""
    rng, starts = np.random.default_rng(1), np.cumsum([FIRST, *rows])
    mask = rng.random((starts[-1] + TAIL, max(rows))) < 0.5  # rows of no sequence: anything
    positions = rng.integers(0, 1000, len(mask)).astype(np.int32)
    for r, count in enumerate(rows):
        at, (ancestors, depths) = slice(starts[r], starts[r + 1]), grow_tree(rng, count)
        if r in chains:
            ancestors, depths = np.tri(count, dtype=bool), np.arange(count)
        mask[at, :count], positions[at] = ancestors, max(lens[r] - count, 0) + depths
    return mask, positions


TREE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32, lse": ({}, dict(return_lse=True)),
    "window": ({}, dict(sliding_window=(10, 3))),
    "bfloat16, window of positions, cap, sinks": (
        dict(dtype="bfloat16"),
        dict(sliding_window=(30, 2), logits_soft_cap=2.0, softmax_aux=SINKS),
    ),
}


@functools.cache
def read_trees(name):
    """A jitted function of a case's arrays and of its trees by the names of arguments."""

    @jax.jit
    def run(*arrays):
        *arrays, trees = arrays
        options = TREE_CASES[name][1]
        return ragged_page_attention(*arrays, len(TREES[0]), cfg=CFG, **options, **trees)

    return run


@pytest.mark.parametrize(
    "name", cover(TREE_CASES, "float32, lse", "bfloat16, window of positions, cap, sinks")
)
def test_trees_match_the_reference(name):
    shape, options = TREE_CASES[name]
    rows, lens = TREES
    q, _, _, pool, tables, starts = draw(**shape, rows=rows, lens=lens)
    trees = dict(zip(("tree_mask", "positions"), grow_trees(rows, lens, chains=(2,)), strict=True))
    if "positions" not in name:
        del trees["positions"]

    arrays = q, pool, np.array(lens, np.int32), tables, starts
    results = [np.asarray(x) for x in jax.tree.leaves(read_trees(name)(*arrays, trees))]
    window = options.get("sliding_window")
    oracle_options = {n: x for n, x in options.items() if n != "sliding_window"} | trees
    reference = expected(q, pool, tables, starts, lens, window=window, **oracle_options)
    for got, want in zip(results, reference, strict=True):
        check_close(got, want, name=name)
    assert not results[0][:FIRST].any() and not results[0][-TAIL:].any()
    assert_no_races()


def test_a_chain_equals_causal_rows_bit_by_bit():
    rows, lens = TREES
    q, _, _, pool, tables, starts = draw(rows=rows, lens=lens)
    arrays = q, pool, np.array(lens, np.int32), tables, starts
    mask, _ = grow_trees(rows, lens, chains=range(len(rows)))
    read = read_trees("float32, lse")
    for tree, causal in zip(read(*arrays, {"tree_mask": mask}), read(*arrays, {}), strict=True):
        np.testing.assert_array_equal(tree, causal)


PACKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (dict(dtype="bfloat16"), dict(sliding_window=40)),
    "packed, scales": (
        dict(dtype="bfloat16", cache="int8"),
        dict(q_scale=0.05, k_scale=0.02, v_scale=np.array([0.02, 0.01], np.float32)),
    ),
    "packed, padding": (dict(h=3, hk=1, d=72, cache="float8_e4m3fn"), dict(k_scale=0.5)),
    "tree": ({}, {}),
}


@pytest.mark.parametrize("name", cover(PACKED, "packed, scales", "packed, padding", "tree"))
def test_writes_pages(name):
    """Padding of the cache stays as it is, and invalid entries of the table write nothing."""
    shape, options = PACKED[name]
    q, keys, values, pool, tables, starts = draw(**shape)
    hk, dim = keys.shape[1:]
    cache = pool
    if "packed" in name:
        groups = -(-pool.shape[2] // 4)
        cache = np.full((*pool.shape[:2], groups * 4, 128), 7, pool.dtype)
        cache[:, :, : 2 * hk, :dim] = pool
        cache = cache.reshape(*pool.shape[:2], groups, 4, 128)
    lens, ends = np.array(LENS, np.int32), np.array([0, 0, len(ROWS)], np.int32)
    arrays = q, keys, values, cache, lens, tables, starts, ends
    if name == "tree":
        options = {"tree_mask": grow_trees(ROWS, LENS)[0]}
    run = jax.jit(lambda *x: ragged_page_attention_v3(*x, cfg=CFG, **options))
    got, written = map(np.asarray, run(*arrays))

    scales = {n: options.get(f"{n}_scale") for n in "qkv"}
    rows = [
        np.asarray(x if x.dtype == pool.dtype else quantise(x, scales[n], pool.dtype))
        for n, x in (("k", keys), ("v", values))
    ]
    rows = np.stack(rows, axis=2).reshape(-1, 2 * hk, dim)
    want = cache.reshape(*pool.shape[:2], -1, cache.shape[-1]).copy()
    for r, length in enumerate(ROWS):
        for m in range(max(length - LENS[r], 0), length):
            page, slot = divmod(LENS[r] - length + m, pool.shape[1])
            want[tables[r, page], slot, : 2 * hk, :dim] = rows[starts[r] + m]
    np.testing.assert_array_equal(written.reshape(want.shape).view(np.uint8), want.view(np.uint8))

    options = dict(options)
    if options.pop("q_scale", None) is not None:
        q = np.asarray(quantise(q, scales["q"], pool.dtype)).astype(np.float64) * scales["q"]
    (o,) = expected(q, want[:, :, : 2 * hk, :dim], tables, starts, **options)
    check_close(got, o, name=name, dtype=shape["dtype"] if "dtype" in shape else "float32")
    assert_no_races()


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_tiles_fit(kind):
    chip = get_chip(kind)
    # blocks of 144 queries: strips of 512 rows would not divide them
    sizes = (
        (32, 8, 16, 512),
        (64, 8, 256, 512),
        (8, 1, 64, 512),
        (16, 16, 1, 512),
        (32, 8, 16, 144),
    )
    for h, hk, ps, tokens in sizes:
        for cache in ("bfloat16", "int8", "float32"):
            request = call(h, hk, ps, cache, tokens=tokens)
            problem = ragged_page_attention.problem(request.arguments)
            t = tiles.choose(problem, chip)
            layout = tiles.Layout(problem, t, chip)
            assert layout.vmem() <= chip.tile_memory
            assert layout.block % tiles.LANES == 0 and layout.rows % layout.strip == 0


def call(
    h: int, hk: int, ps: int, cache: str, d: int = 128, dtype: str = "bfloat16", tokens: int = 512
) -> Any:
    """Returns what the registry hands to the hooks."""
    arrays = {
        "queries": ((tokens, h, d), dtype),
        "kv_pages": ((64, ps, 2 * hk, d), cache),
        "context_lens": ((8,), "int32"),
        "block_tables": ((8, 8192), "int32"),
        "query_start_loc": ((9,), "int32"),
    }
    structs = {name: jax.ShapeDtypeStruct(*form) for name, form in arrays.items()}
    return bound(ragged_page_attention.call, num_seqs=8, **structs)


def test_interpreted_without_parameters():
    """The call that ``interpret_mode`` or EJKERNEL_INTERPRET=1 alone makes."""
    q, _, _, pool, tables, starts = draw(rows=(1, 9), lens=(20, 30))
    lens = np.array([20, 30], np.int32)
    with interpreter(True):
        run = jax.jit(lambda *arrays: ragged_page_attention(*arrays, 2, cfg=CFG))
        got = run(q, pool, lens, tables, starts)
    check_close(np.asarray(got), expected(q, pool, tables, starts, lens)[0], name="o")


def test_refuses_what_it_cannot_do():
    for request, reason in (
        (call(8, 2, 16, "bfloat16", d=64), "kv_pages: rows of 64 columns are not supported"),
        (call(6, 3, 16, "bfloat16"), "kv_pages: 3 kv heads of bfloat16 are not 1, 2, 4 or"),
        (call(8, 1, 16, "int8"), "kv_pages: 1 kv heads of int8 are not 1, 2, 4 or"),
        (call(8, 2, 16, "bfloat16", dtype="float16"), "queries: float16 is not supported"),
    ):
        assert (ragged_page_attention.supports(request) or "").startswith(reason)
