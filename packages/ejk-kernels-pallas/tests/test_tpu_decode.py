"""TPU decoding over paged and contiguous caches in Pallas' TPU interpreter, against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import get_chip, on_chip
from ejkernel.kernels.pallas.tpu.mla_decode.implementation import mla_decode
from ejkernel.kernels.pallas.tpu.page_attention import tiles
from ejkernel.kernels.pallas.tpu.page_attention.implementation import page_attention
from ejkernel.kernels.pallas.tpu.ragged_decode_attention.implementation import (
    ragged_decode_attention,
)
from ejkernel.ops import FwdParams, interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejktest.bound import bound
from ejktest.cases.paged import in_context
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.drawn import grow_tree, wild_tables
from ejktest.oracles import paged
from ejktest.tolerance import check_close

PARAMS = pltpu.InterpretParams(detect_races=True)
# an empty sequence between others, one that ends with a block, one of a single token
LENS = (70, 0, 64, 1, 150)


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(PARAMS):
        yield


def draw(h=4, hk=2, d=128, dv=128, ps=16, dtype="float32", cache=None):
    """Arguments; pages and tokens that no context covers hold NaN."""
    rng = np.random.default_rng(0)
    tables, pages = wild_tables(rng, LENS, ps)
    q = rng.standard_normal((len(LENS), h, d)).astype(jnp.dtype(dtype))
    seen = in_context(LENS, tables, pages, ps)[..., None, None]
    caches = []
    for n in (d, dv):
        x = rng.standard_normal((pages, ps, hk, n))
        x = np.clip(np.round(x * 40), -128, 127) if cache == "int8" else np.where(seen, x, np.nan)
        caches.append(x.astype(jnp.dtype(cache or dtype)))
    return q, *caches, np.array(LENS, np.int32), tables


def expected(function, q, k, v, *indices, **options):
    """The output and lse."""
    names = {"sliding_window": "left", "logits_soft_cap": "cap", "softmax_aux": "aux"}
    options = {names.get(n, n): x for n, x in options.items()}
    for name in options.keys() - {"left", "cap"}:
        options[name] = np.asarray(options[name], np.float64)
    with jax.enable_x64(True):
        wide = [np.nan_to_num(np.asarray(x).astype(np.float64)) for x in (q, k, v)]
        options |= {"scale": q.shape[-1] ** -0.5, "return_lse": True}
        return [np.asarray(x) for x in function(*wide, *indices, **options)]


SINKS = np.random.default_rng(7).standard_normal((4, 3)).astype(np.float32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two pages a block": ({}, dict(cfg={"pages_per_block": 2})),
    "bfloat16, window, cap, sinks": (
        dict(dtype="bfloat16"),
        dict(sliding_window=40, logits_soft_cap=2.0, softmax_aux=SINKS, cfg={"pages_per_block": 2}),
    ),
    "one kv head, long page": (dict(hk=1, ps=64, d=256), dict(softmax_aux=SINKS[0])),
    "int8": (
        dict(dtype="bfloat16", cache="int8"),
        dict(k_scale=0.02, v_scale=np.array([0.02, 0.01], np.float32)),
    ),
    "e4m3": (dict(cache="float8_e4m3fn"), dict(k_scale=np.float32(0.5))),
}


@pytest.mark.parametrize("name", CASES)
def test_pages_against_the_reference(name):
    shape, options = CASES[name]
    arrays = draw(**shape)
    run = jax.jit(lambda *x: page_attention(*x, return_lse=True, **options))
    got, lse = map(np.asarray, run(*arrays))
    options = {n: x for n, x in options.items() if n != "cfg"}
    want, want_lse = expected(paged.page_attention, *arrays, **options)
    assert got.dtype == arrays[0].dtype
    check_close(np.asarray(got), want, name=name)
    check_close(np.asarray(lse), want_lse, dtype=got.dtype, name="lse")
    assert not np.asarray(got, np.float32)[np.array(LENS) == 0].any()
    assert_no_races()


def test_nan_that_a_sequence_sees_is_in_its_output_and_lse():
    arrays = list(draw())
    arrays[0][3] = np.nan
    run = jax.jit(lambda *x: page_attention(*x, return_lse=True, cfg={"pages_per_block": 2}))
    for x in run(*arrays):
        rows = np.isnan(x).reshape(len(LENS), -1)
        assert rows[3].all() and not np.delete(rows, 3, axis=0).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contiguous_against_the_reference(dtype):
    """Slices of caches whose length no block divides; what lies outside them holds NaN."""
    rng = np.random.default_rng(0)
    starts, ends = np.array([0, 40, 7, 20, 149]), np.array([152, 40, 64, 130, 150])
    q = rng.standard_normal((5, 4, 128)).astype(jnp.dtype(dtype))
    token = np.arange(152)
    seen = (token >= starts[:, None]) & (token < ends[:, None])
    k, v = (
        np.where(seen[..., None, None], rng.standard_normal((5, 152, 2, 128)), np.nan)
        for _ in range(2)
    )
    arrays = q, k.astype(q.dtype), v.astype(q.dtype), starts, ends
    cfg = {"fwd_params": {"kv_blocksize": 64}}
    run = jax.jit(lambda *x: ragged_decode_attention(*x, cfg=cfg, return_lse=True))
    results = jax.block_until_ready(run(*arrays))
    outputs = expected(paged.ragged_decode_attention, *arrays)
    for got, want in zip(results, outputs, strict=True):
        check_close(np.asarray(got), want, dtype=dtype)
    assert_no_races()


LATENT: dict[str, dict[str, Any]] = {
    "several tokens, window": dict(sliding_window=(20, 0), cfg={"pages_per_block": 2}),
    "e4m3, sinks, cap": dict(k_scale=0.5, softmax_aux=SINKS, logits_soft_cap=2.0),
}


def check_latent(name: str, tokens: int, options: dict[str, Any]) -> None:
    """Compares rows of 256 whose first 128 are values, of this number of new tokens."""
    rng = np.random.default_rng(0)
    tables, pages = wild_tables(rng, LENS, 32)
    q = rng.standard_normal((len(LENS), tokens, 4, 256)).astype(np.float32)
    seen = in_context(LENS, tables, pages, 32)[..., None]
    cache = np.where(seen, rng.standard_normal((pages, 32, 256)), np.nan)
    cache = cache.astype(jnp.dtype("float8_e4m3fn" if "e4m3" in name else "float32"))
    lens = np.array(LENS, np.int32)

    def decode(*arrays):
        return mla_decode(*arrays, latent_dim=128, return_lse=True, **options)

    # at once: XLA's threads are few, and the interpreter needs one while the reference runs
    got, lse = map(np.asarray, jax.jit(decode)(q, cache, lens, tables))
    options = {n: x for n, x in options.items() if n != "cfg"}
    names = {"logits_soft_cap": "cap", "softmax_aux": "aux"}
    if "sliding_window" in options:
        options["left"] = options["sliding_window"][0]
        names["sliding_window"] = "window"
    options = {names.get(n, n): x for n, x in options.items()}
    with jax.enable_x64(True):
        wide = (np.nan_to_num(np.asarray(x).astype(np.float64)) for x in (q, cache))
        want, want_lse = paged.mla_decode(*wide, lens, tables, 128, scale=256**-0.5, **options)
    check_close(np.asarray(got), np.asarray(want))
    check_close(np.asarray(lse), np.asarray(want_lse), name="lse")
    assert_no_races()


@pytest.mark.parametrize("name", LATENT)
def test_latent_against_the_reference(name):
    """Two new tokens, but one token in a context."""
    check_latent(name, 2, LATENT[name])


TREES: dict[str, tuple[int, dict[str, Any]]] = {
    "tree longer than contexts": (40, dict(cfg={"pages_per_block": 1})),
    "window": (5, dict(sliding_window=(4, 1), cfg={"pages_per_block": 2})),
    "window of positions": (5, dict(sliding_window=(30, 1), cfg={"pages_per_block": 1})),
}


@pytest.mark.parametrize("name", TREES)
def test_latent_trees(name):
    tokens, options = TREES[name]
    rng = np.random.default_rng(1)
    trees = [grow_tree(rng, tokens) for _ in LENS]
    options = options | {"tree_mask": np.stack([ancestors for ancestors, _ in trees])}
    if "positions" in name:
        depths = np.stack([depth for _, depth in trees])
        options["positions"] = (np.array(LENS)[:, None] - tokens + depths).astype(np.int32)
    check_latent(name, tokens, options)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_tiles_fit(kind):
    chip = get_chip(kind)
    for h, hk, d, ps in ((32, 8, 128, 16), (64, 8, 128, 256), (128, 1, 256, 64), (8, 8, 128, 256)):
        for cache in ("bfloat16", "int8", "float32"):
            arrays = [
                jax.ShapeDtypeStruct((8, h, d), "bfloat16"),
                *[jax.ShapeDtypeStruct((64, ps, hk, d), cache)] * 2,
                jax.ShapeDtypeStruct((8,), "int32"),
                jax.ShapeDtypeStruct((8, 512), "int32"),
            ]
            names = ("query", "key_cache", "value_cache", "context_lens", "block_tables")
            call = bound(page_attention.call, **dict(zip(names, arrays, strict=True)))
            p = page_attention.problem(call.arguments)
            t = tiles.choose(p, chip)
            assert t.vmem(p) <= chip.tile_memory
            assert t.pages == 1 or t.block * hk <= tiles.MAX_COLUMNS


@pytest.mark.parametrize(
    ("length", "hk"), [(2, 16), (8, 2), (24, 4), (1000, 2), (4096, 1), (32768, 12)]
)
def test_tiles_of_a_contiguous_cache_of_any_length_are_a_config(length, hk):
    chip, kernel = get_chip("TPU v5 lite"), ragged_decode_attention
    cache = jax.ShapeDtypeStruct((8, length, hk, 128), "bfloat16")
    range_ = jax.ShapeDtypeStruct((8,), "int32")
    arrays = jax.ShapeDtypeStruct((8, hk, 128), "bfloat16"), cache, cache, range_, range_
    names = ("query", "key", "value", "sequence_start", "sequence_end")
    p = kernel.problem(bound(kernel.call, **dict(zip(names, arrays, strict=True))).arguments)
    t = kernel.choose(p, chip)
    cfg = {"fwd_params": FwdParams(**kernel.fields(t)["fwd_params"])}
    assert kernel.apply_config(t, cfg, p, chip) == t and t.vmem(p) <= chip.tile_memory


@pytest.mark.parametrize("kind", ["TPU v4", "TPU7x"])
def test_lowers_to_mosaic_kernels(kind):
    arrays = [
        jax.ShapeDtypeStruct((4, 16, 128), "bfloat16"),
        *[jax.ShapeDtypeStruct((64, 16, 8, 128), "int8")] * 2,
        jax.ShapeDtypeStruct((4,), "int32"),
        jax.ShapeDtypeStruct((4, 16), "int32"),
    ]
    with interpret_mode(False), on_chip(kind):
        run = jax.jit(functools.partial(page_attention, k_scale=0.1, v_scale=0.1))
        made = export.export(run, platforms=["tpu"])(*arrays)
    assert made.mlir_module().count("tpu_custom_call") == 1


def test_refuses_what_it_cannot_do():
    q, k, v, lens, tables = draw()
    with pytest.raises(Unsupported, match="num_splits: not supported"):
        page_attention(q, k, v, lens, tables, num_splits=2)
    with pytest.raises(Unsupported, match="key_cache: head dim 64 is no multiple of 128"):
        page_attention(q[..., :64], k[..., :64], v, lens, tables)
    latent = np.ones((4, 16, 192), np.float32)
    with pytest.raises(Unsupported, match=r"rows of 192 are no multiple of 128; pad .* to 256"):
        mla_decode(np.ones((5, 4, 192), np.float32), latent, lens, tables % 4, latent_dim=128)
    with pytest.raises(Unsupported, match="latent_dim: 64 is no multiple of 128"):
        mla_decode(q, latent[..., :128], lens, tables % 4, latent_dim=64)
    wide = np.concatenate([k, k], axis=-1)
    with pytest.raises(Unsupported, match="key_cache: 2 kv heads of 256 are not supported"):
        page_attention(np.concatenate([q, q], axis=-1), wide, v, lens, tables)
    with pytest.raises(Unsupported, match="query: float16 is not supported"):
        page_attention(q.astype(np.float16), k, v, lens, tables)
    large = [jax.ShapeDtypeStruct((8, 4096, 8, 256), "bfloat16")] * 2
    names = ("query", "key_cache", "value_cache", "context_lens", "block_tables")
    indices = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((5,), (5, 2))]
    arrays = jax.ShapeDtypeStruct((5, 8, 256), "bfloat16"), *large, *indices
    reason = page_attention.supports(
        bound(page_attention.call, **dict(zip(names, arrays, strict=True)))
    )
    assert reason == "key_cache: pages of 4096 tokens are too large for vector memory"
    arrays = draw(hk=1, cache="int8")
    with pytest.raises(Unsupported, match="16 rows of a page, tokens times heads, are no multiple"):
        page_attention(*arrays)
