"""Large finite logits give no NaN in Triton's flash attention and paged decoding, interpreted."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ejktest.cases import large_logits
from ejktest.grids import without

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import flash_attention, page_attention, ragged_page_attention
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(80)):
        yield


# the others differ in what the cases of ``test_flash_attention_gpu.py`` try on a GPU
CASES = [c for c in large_logits.CASES if str(c) not in ("bias_bfloat16", "bias_causal")]


@pytest.mark.parametrize(
    "case", without(CASES, *(c for c in CASES if str(c) == "bias_float16")), ids=str
)
def test_against_oracle(case: large_logits.Case) -> None:
    large_logits.check(case, flash_attention)


@pytest.mark.parametrize("unit, chip", [(1.0, 90), (0.3, 90), (1e10, 90), (0.3, 80)])
def test_maxima_that_cross_from_slope_to_slope(unit: float, chip: int) -> None:
    """o and lse, with the large logits as a bias (unit 1) or as dot products."""
    x = large_logits.wandering_maxima(unit, blocks=5).reshape(4, 16, -1)
    v = np.random.default_rng(1).standard_normal((4, x.shape[2], 1, 16)).astype(np.float32)
    q, k = np.zeros((4, 16, 1, 16), np.float32), np.zeros_like(v)
    bias = x[:, None] if unit == 1.0 else None
    if bias is None:  # each query picks a column of the keys
        q[:], k[:, :, 0] = np.eye(16)[:, None], np.swapaxes(x, 1, 2)
    with compile_for(cuda_target(chip)):
        o, lse = flash_attention(
            q, k, v, bias, softmax_scale=unit, precision="highest", return_lse=True,
            cfg={"fwd_params": {"q_blocksize": 16, "kv_blocksize": 16}},
        )  # fmt: skip
    logits = x.astype(np.float64) * unit
    high = logits.max(2, keepdims=True)
    p = np.exp(logits - high)
    total = p.sum(2, keepdims=True)
    want = (p / total) @ v[:, :, 0].astype(np.float64)
    np.testing.assert_allclose(o[:, :, 0], want, rtol=0, atol=2**-18)
    np.testing.assert_allclose(lse[..., 0], (high + np.log(total))[..., 0], rtol=2**-18)


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("size, scale", [(1e5, None), (1.0, 1e10), (1.0, -1e10)])
def test_paged_decoding(splits: int | None, size: float, scale: float | None) -> None:
    """One key stands out by far, wherever it is: the answer is its value."""
    d, page, lens = 16, 8, np.array([37, 5], np.int32)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((10, page, 1, d)).astype(np.float32) for _ in range(2))
    k *= size * d**0.5 / np.linalg.norm(k, axis=-1, keepdims=True)
    tables = np.arange(10, dtype=np.int32).reshape(2, 5)
    best = [(3, 4), (5, 2)]
    q = np.stack([k[at] for at in best]) * np.sign(scale or 1.0)
    o = page_attention(q, k, v, lens, tables, softmax_scale=scale, num_splits=splits)
    np.testing.assert_allclose(o, np.stack([v[at] for at in best]), rtol=1e-6)


@pytest.mark.parametrize("size, scale", [(1e5, None), (1.0, -1e10)])
def test_ragged_prefill(size: float, scale: float | None) -> None:
    """Every row finds the one key that stands out for it; all rows are tiles of a prefill."""
    d, n = 16, 20
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((3, 8, 2, d)).astype(np.float32)
    kv[:, :, 0] *= size * d**0.5 / np.linalg.norm(kv[:, :, 0], axis=-1, keepdims=True)
    k, v = (kv[:, :, i].reshape(-1, d) for i in range(2))
    q = k[:n, None] * np.sign(scale or 1.0)
    tables = np.arange(3, dtype=np.int32)[None]
    o = ragged_page_attention(
        q, kv, np.array([n]), tables, np.array([0, n]), 1, softmax_scale=scale
    )
    np.testing.assert_allclose(o[:, 0], v[:n], rtol=1e-6)
