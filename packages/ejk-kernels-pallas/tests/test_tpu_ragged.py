"""Ragged attention over pages in Pallas' TPU interpreter, against the float64 oracle.

Memory that nobody wrote is NaN, pages hold NaN where no context reaches, and races are found.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import interpreter
from ejkernel.kernels.pallas.tpu.ragged_page_attention.implementation import (
    ragged_page_attention,
    ragged_page_attention_v3,
)
from ejkernel.ops import interpret_mode
from ejkernel.types.arrays import quantise
from ejktest.cases.paged import in_context
from ejktest.drawn import wild_tables
from ejktest.oracles import paged
from ejktest.tolerance import check_close

PARAMS = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
# single rows, no rows, a block of queries with and without full blocks of keys, a short context
ROWS = (1, 0, 20, 1, 3, 0)
LENS = (140, 7, 300, 1, 2, 9)
FIRST, TAIL = 2, 3  # rows of no sequence at both ends


@pytest.fixture(autouse=True)
def interpreted():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with interpret_mode(), interpreter(PARAMS):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def check_no_races() -> None:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator

    assert not simulator.races.races_found


def draw(h=4, hk=2, d=128, ps=16, dtype="float32", cache=None):
    """Queries, new keys and values, a cache, lengths, tables and starts."""
    rng = np.random.default_rng(0)
    tables, pages = wild_tables(rng, LENS, ps)
    starts = np.cumsum([FIRST, *ROWS]).astype(np.int32)
    shape = (starts[-1] + TAIL, h, d)
    q = rng.standard_normal(shape).astype(jnp.dtype(dtype))
    keys, values = (rng.standard_normal((shape[0], hk, d)).astype(q.dtype) for _ in range(2))
    pool = rng.standard_normal((pages, ps, 2 * hk, d))
    if cache == "int8":
        pool = np.clip(np.round(pool * 40), -128, 127)
    else:
        pool = np.where(in_context(LENS, tables, pages, ps)[..., None, None], pool, np.nan)
    return q, keys, values, pool.astype(jnp.dtype(cache or dtype)), tables, starts


def expected(q, pool, tables, starts, lens=LENS, **options):
    names = {"sliding_window": "left", "logits_soft_cap": "cap", "softmax_aux": "aux"}
    options = {names.get(n, n): x for n, x in options.items() if n != "cfg"}
    for name in options.keys() - {"left", "cap"}:
        options[name] = np.asarray(options[name], np.float64)
    with jax.enable_x64(True):
        wide = [np.nan_to_num(np.asarray(x).astype(np.float64)) for x in (q, pool)]
        o = paged.ragged_page_attention(
            *wide, lens, tables, starts, len(ROWS), scale=q.shape[-1] ** -0.5, **options
        )
        return np.asarray(o)


SINKS = np.random.default_rng(7).standard_normal((4, 3)).astype(np.float32)
CFG = {"num_kv_pages_per_block": 8, "num_queries_per_block": 16}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({}, {}),
    "bfloat16, window, cap, sinks": (
        dict(dtype="bfloat16"),
        dict(sliding_window=40, logits_soft_cap=2.0, softmax_aux=SINKS),
    ),
    "int8": (
        dict(dtype="bfloat16", cache="int8"),
        dict(k_scale=0.02, v_scale=np.array([0.02, 0.01], np.float32)),
    ),
    "e4m3": (dict(h=8, cache="float8_e4m3fn"), dict(k_scale=np.float32(0.5))),
}


@pytest.mark.parametrize("name", CASES)
def test_reads_pages(name):
    shape, options = CASES[name]
    q, _, _, pool, tables, starts = draw(**shape)

    def run(*arrays):
        return ragged_page_attention(*arrays, len(ROWS), cfg=CFG, **options)

    # at once: XLA's threads are few, and the interpreter needs one while the reference runs
    got = np.asarray(jax.jit(run)(q, pool, np.array(LENS, np.int32), tables, starts))
    want = expected(q, pool, tables, starts, **options)
    assert got.dtype == q.dtype
    check_close(got, want, name=name)
    assert not np.asarray(got[:FIRST], np.float32).any()
    assert not np.asarray(got[-TAIL:], np.float32).any()
    check_no_races()


PACKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (dict(dtype="bfloat16"), dict(sliding_window=40)),
    "packed, scales": (
        dict(dtype="bfloat16", cache="int8"),
        dict(q_scale=0.05, k_scale=0.02, v_scale=np.array([0.02, 0.01], np.float32)),
    ),
    "packed, padding": (dict(h=3, hk=1, d=72, cache="float8_e4m3fn"), dict(k_scale=0.5)),
}


@pytest.mark.parametrize("name", PACKED)
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
    o = expected(q, want[:, :, : 2 * hk, :dim], tables, starts, **options)
    check_close(got, o, name=name, dtype=shape["dtype"] if "dtype" in shape else "float32")
    check_no_races()
