"""Mean pooling through Triton's interpreter, against float64 means."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from ejkernel.kernels.triton import mean_pooling
from ejkernel.kernels.triton.mean_pooling import backward, forward, tiles
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.problems.mean_pooling import PoolingProblem
from ejktest.abstract import AbstractCall
from ejktest.cases.pooling import check_pool
from ejktest.drawn import normal
from ejktest.oracles import pooling as oracle
from ejktest.transforms import check_transformations
from ejktest.triton_calls import resources

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
def test_batches_match_the_reference(chunk):
    mask = np.random.default_rng(0).integers(0, 2, (2, 35))
    mask[1, :12] = 0
    check(normal(2, 35, 20), None, mask, chunk)
    check(normal(2, 35, 20), None, None, chunk)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_match_the_reference(chunk, masked):
    mask = np.random.default_rng(1).integers(0, 2, 23).astype(bool)
    mask[:6] = False
    out = check(normal(23, 5, 4), CU, mask if masked else None, chunk)
    assert out.shape == ((4, 5, 4) if chunk is None else (4, 5, 5, 4))


@pytest.mark.parametrize("masked", [False, True])
def test_long_groups_are_split(masked):
    """Few groups of many rows, in a batch, in chunks, and packed with a border inside a split."""
    mask = np.random.default_rng(1).integers(0, 2, (1, 700))
    x, cu = normal(1, 700, 20), np.array([0, 130, 130, 650], np.int32)
    row_mask = mask if masked else None
    assert tiles.choose(PoolingProblem(1, 700, 20, 400, 0, False, "float32"), cuda_target(90)).split
    check(x, None, row_mask, None, None)
    check(x, None, row_mask, 400, None)
    check(x[0], cu, row_mask[0] if masked else None, None, None)


def test_narrow_and_excluded_rows():
    """Masked rows may hold anything."""
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
    """More sequences than a program looks at at once."""
    for module in (forward, backward):
        monkeypatch.setattr(module, "lane_count", lambda sequences: 4)
    check(normal(24, 3), np.array([0, 0, 2, 2, 2, 9, 10, 10, 20, 20, 20], np.int32))


def test_transformations_keep_results():
    pairs = {"x": normal(2, 23, 2), "cu_seqlens": jnp.stack([CU, CU // 2])}
    check_transformations(partial(mean_pooling, chunk_size=5), pairs)


def test_unsupported_calls_are_refused():
    with jax.enable_x64(True), pytest.raises(Unsupported, match="float64"):
        mean_pooling(np.zeros((2, 3, 4)))


def pooled(*shape, dtype="bfloat16", chunk=None, **arrays):
    return AbstractCall(
        "mean_pooling", {"x": (shape, dtype), **arrays}, {"chunk_size": chunk}, ("x",)
    )


COMPILED = {
    "chunks": pooled(8, 8192, 2048, chunk=64),
    "whole": pooled(1, 65536, 2048),
    "packed": pooled(
        65536, 2048, dtype="float32", cu_seqlens=((41,), "int32"), attention_mask=((65536,), "bool")
    ),
    "odd": pooled(2, 5000, 130, dtype="float16", chunk=7),
}
CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.parametrize(
    ("call", "chip"),
    [
        ("chunks", "sm_90"),
        ("packed", "sm_90"),
        *(pytest.param(n, c, marks=pytest.mark.slow) for n in COMPILED for c in CHIPS),
    ],
)
def test_calls_compile_without_spills(call, chip):
    for kernel, used in resources(COMPILED[call], chip).items():
        print(f"{call} {kernel} {chip}: {used}")
        assert used.spills == 0
        # two programs run together
        assert chip == "gfx942" or used.registers * 32 * used.num_warps * 2 <= 65536
