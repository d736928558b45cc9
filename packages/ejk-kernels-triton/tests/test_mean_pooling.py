"""Mean pooling through Triton's interpreter, against float64 means."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.triton import mean_pooling
from ejkernel.kernels.triton.mean_pooling import backward, forward, tiles
from ejkernel.kernels.triton.mean_pooling.implementation import PoolPlan
from ejkernel.kernels.triton.resources import measure, plan_source
from ejkernel.kernels.triton.targets import compile_for, cuda_target, rocm_target
from ejkernel.ops import interpret_mode
from ejkernel.types.structure import Unsupported
from ejktest.drawn import check_pool, normal
from ejktest.oracles import pooling as oracle
from ejktest.transforms import check_transformations

pytest.importorskip("triton")

# an empty sequence, one of a single row, rows of padding
CU = np.array([0, 9, 9, 10, 21], np.int32)
SMALL = {"token_tile": 16, "channel_tile": 16}


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(90, 3)):
        yield


def check(x, cu=None, mask=None, chunk=None, cfg=SMALL):
    def pool(x, cu, mask, chunk):
        return mean_pooling(x, cu, chunk_size=chunk, attention_mask=mask, cfg=cfg)

    return check_pool(pool, x, cu, mask, chunk)


@pytest.mark.parametrize("chunk", [None, 1, 5, 16, 100])
def test_batched(chunk):
    mask = np.random.default_rng(0).integers(0, 2, (2, 35))
    mask[1, :12] = 0
    check(normal(2, 35, 20), None, mask, chunk)
    check(normal(2, 35, 20), None, None, chunk)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_packed(chunk, masked):
    mask = np.random.default_rng(1).integers(0, 2, 23).astype(bool)
    mask[:6] = False
    out = check(normal(23, 5, 4), CU, mask if masked else None, chunk)
    assert out.shape == ((4, 5, 4) if chunk is None else (4, 5, 5, 4))


@pytest.mark.parametrize("masked", [False, True])
def test_long_groups_are_summed_in_parts(masked):
    """Few groups of many rows, in a batch, in chunks, and packed with a border inside a part."""
    mask = np.random.default_rng(1).integers(0, 2, (1, 700))
    x, cu = normal(1, 700, 20), np.array([0, 130, 130, 650], np.int32)
    kept = mask if masked else None
    assert tiles.choose(tiles.Problem(1, 700, 20, 400, 0, False, "float32"), cuda_target(90)).part
    check(x, None, kept, None, None)
    check(x, None, kept, 400, None)
    check(x[0], cu, kept[0] if masked else None, None, None)


def test_narrow_and_excluded_rows():
    """Rows that count nowhere may hold anything."""
    for dtype in (jnp.bfloat16, jnp.float16):
        check(normal(2, 40, 3, dtype=dtype), chunk=7)
    x = normal(23, 2).at[jnp.array([3, 22])].set(jnp.nan)
    mask = np.arange(23) != 3
    for chunk in (None, 5):
        run = partial(mean_pooling, chunk_size=chunk, attention_mask=mask)
        out, back = jax.vjp(lambda x, run=run: run(x, CU), x)
        assert np.isfinite(out).all() and np.isfinite(back(jnp.ones_like(out))[0]).all()


def test_nothing_to_average():
    np.testing.assert_array_equal(check(normal(23, 2), np.zeros(3, np.int32)), 0)
    for shape, cu in (((2, 0, 3), None), ((0, 3), np.zeros(3, np.int32)), ((2, 4, 0), None)):
        want = oracle.mean_pooling(np.zeros(shape), cu, chunk_size=4)
        np.testing.assert_array_equal(mean_pooling(jnp.zeros(shape), cu, chunk_size=4), want)


def test_many_sequences(monkeypatch):
    """More sequences than a program looks at together."""
    for module in (forward, backward):
        monkeypatch.setattr(module, "lane_count", lambda sequences: 4)
    check(normal(24, 3), np.array([0, 0, 2, 2, 2, 9, 10, 10, 20, 20, 20], np.int32))


def test_transformations():
    pairs = {"x": normal(2, 23, 2), "cu_seqlens": jnp.stack([CU, CU // 2])}
    check_transformations(partial(mean_pooling, chunk_size=5), pairs)


def test_refuses():
    with jax.enable_x64(True), pytest.raises(Unsupported, match="float64"):
        mean_pooling(np.zeros((2, 3, 4)))


TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_90": cuda_target(90),
    "sm_100": cuda_target(100, 148),
    "gfx942": rocm_target("gfx942"),
}
# batch, rows, channels, chunk, sequences, masked, dtype
SHAPES = {
    "chunks": (8, 8192, 2048, 64, 0, False, "bfloat16"),
    "whole": (1, 65536, 2048, 65536, 0, False, "bfloat16"),
    "packed": (1, 65536, 2048, 65536, 40, True, "float32"),
    "odd": (2, 5000, 130, 7, 0, False, "float16"),
}


def compiled(shape, kind, chip):
    p, target = tiles.Problem(*SHAPES[shape]), TARGETS[chip]
    t = tiles.choose(p, target)
    plan = PoolPlan(p, t, kind)
    sums = PoolPlan(p, t, "sums").outputs()
    of = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(p.dtype))
    cu = [of((1, p.sequences + 1), dtype=jnp.int32)] * bool(p.sequences)
    kept = [of((p.batch, p.rows), dtype=jnp.int8)] * p.masked
    if kind == "spread":
        count = [of((p.batch * p.groups,), dtype=jnp.float32)] * p.masked
        avals = [of((p.batch * p.groups, p.channels)), *count, *kept, *cu]
    else:
        avals = [*sums, *cu] if kind == "merge" else [of((p.batch, p.rows, p.channels)), *kept, *cu]
    used = measure(plan_source(plan, avals, target), target)
    print(f"{shape} {kind} {chip}: {t}: {used}")
    assert used.spills == 0
    # two programs run together
    assert target.platform != "cuda" or used.registers * 32 * used.num_warps * 2 <= 65536


@pytest.mark.parametrize(
    ("shape", "kind"), [("chunks", "sums"), ("packed", "sums"), ("chunks", "spread")]
)
def test_compiles(shape, kind):
    compiled(shape, kind, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("chip", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_everywhere(shape, chip):
    p = tiles.Problem(*SHAPES[shape])
    for kind in ("sums", "spread", *["merge"] * bool(tiles.choose(p, TARGETS[chip]).part)):
        compiled(shape, kind, chip)
