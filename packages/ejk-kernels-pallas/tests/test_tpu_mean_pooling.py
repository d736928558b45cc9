"""TPU mean pooling in Pallas' TPU interpreter, against float64 means."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import get_chip, on_chip
from ejkernel.kernels.pallas.tpu.mean_pooling import tiles
from ejkernel.kernels.pallas.tpu.mean_pooling.implementation import mean_pooling
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.problems.mean_pooling import PoolingProblem
from ejktest.cases.pooling import check_pool
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.drawn import normal
from ejktest.grids import cover

PARAMS = pltpu.InterpretParams(detect_races=True)
# an empty sequence, one of a single row, rows of padding
CU = np.array([0, 9, 9, 10, 210], np.int32)


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(PARAMS):
        yield


def check(x, cu=None, mask=None, chunk=None):
    @jax.jit
    def pool(x, cu, mask):
        return mean_pooling(x, cu, chunk_size=chunk, attention_mask=mask)

    out = check_pool(lambda x, cu, mask, chunk: pool(x, cu, mask), x, cu, mask, chunk)
    assert_no_races()
    return out


@pytest.mark.parametrize(
    ("chunk", "masked"),
    cover(
        itertools.product([None, 5, 9, 16], [False, True]),
        *((None, True), (5, False), (9, False), (16, True)),
    ),
)
def test_chunks_match_the_reference(chunk, masked):
    mask = np.random.default_rng(0).integers(0, 2, (2, 35))
    mask[1, :16] = 0
    dtype = jnp.bfloat16 if chunk == 16 else jnp.float32
    check(normal(2, 35, 2, 10, dtype=dtype), None, mask if masked else None, chunk)


@pytest.mark.parametrize("blocks", [(2, 32, 128), (0, 128, 128)])
def test_several_blocks(blocks, monkeypatch):
    """Blocks of chunks in a batch row, and chunks of several blocks, neither a whole number."""
    chosen = tiles.Tiles(*blocks)
    monkeypatch.setattr(mean_pooling, "choose", lambda p, chip: chosen)
    mask = np.random.default_rng(1).integers(0, 2, (2, 150))
    check(normal(2, 150, 200), None, mask, 16 if chosen.groups else 140)


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_match_the_reference(masked):
    mask = np.random.default_rng(1).integers(0, 2, 230).astype(bool)
    mask[:6] = False
    out = check(normal(230, 5, 4), CU, mask if masked else None)
    assert out.shape == (4, 5, 4)


def test_rows_that_do_not_count_may_be_nan():
    x, mask = normal(1, 48, 20, dtype=jnp.bfloat16), np.ones((1, 48), bool)
    mask[:, 10:] = False
    cu = np.array([0, 4, 30])
    for run in (
        lambda x: mean_pooling(x, attention_mask=mask, chunk_size=16),
        lambda x: mean_pooling(x[0], cu, attention_mask=mask[0]),
    ):
        dirty = jnp.where(mask[..., None], x, jnp.nan)
        run = jax.jit(run)
        np.testing.assert_array_equal(run(dirty), run(jnp.where(mask[..., None], x, 0)))


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v6 lite"])
@pytest.mark.parametrize(
    "p",
    [
        PoolingProblem(8, 8192, 2048, 64, 0, False, "bfloat16"),
        PoolingProblem(8, 8192, 4096, 8192, 0, True, "float32"),
        PoolingProblem(1, 65536, 1024, 65536, 64, True, "bfloat16"),
        PoolingProblem(2, 100, 33, 7, 0, False, "float32"),
    ],
    ids=str,
)
def test_tiles_fit(kind, p):
    chip = get_chip(kind)
    t = tiles.choose(p, chip)
    assert t.vmem(p) <= chip.vmem // 4 * 3
    assert t.groups == 0 or t.rows == t.groups * p.chunk


@pytest.mark.parametrize("kind", ["TPU v4", "TPU7x"])
def test_lowers_to_mosaic_kernels(kind):
    x, cu = jax.ShapeDtypeStruct((512, 256), "bfloat16"), jax.ShapeDtypeStruct((5,), "int32")
    mask = jax.ShapeDtypeStruct((512,), "bool")

    def packed(x, cu, mask):
        return mean_pooling(x, cu, attention_mask=mask).astype(jnp.float32).sum()

    def chunks(x, cu, mask):
        out = mean_pooling(x[None], chunk_size=16, attention_mask=mask[None])
        return out.astype(jnp.float32).sum()

    def short_last_chunk(x, cu, mask):
        return mean_pooling(x[None, :20], chunk_size=7).astype(jnp.float32).sum()

    with interpret_mode(False), on_chip(kind):
        for run in (packed, chunks, short_last_chunk):
            made = export.export(jax.jit(jax.value_and_grad(run)), platforms=["tpu"])(x, cu, mask)
            assert made.mlir_module().count("tpu_custom_call") == 2


def test_refuses_what_it_cannot_do():
    x = jnp.ones((8, 4))
    with pytest.raises(Unsupported, match="x: float16 is not supported"):
        mean_pooling(x.astype(jnp.float16), np.array([0, 8]))
    with pytest.raises(Unsupported, match="chunk_size: chunks of packed sequences"):
        mean_pooling(x, np.array([0, 8]), chunk_size=4)
