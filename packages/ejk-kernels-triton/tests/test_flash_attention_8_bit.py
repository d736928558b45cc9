"""8-bit flash attention by Triton's interpreter, against the float64 oracle on the same values."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import flash_attention
from ejkernel.kernels.triton.targets import compile_for, cuda_target, rocm_target
from ejkernel.ops import KernelNotSupported, interpret_mode
from ejktest.bound import bound, struct
from ejktest.drawn import normal
from ejktest.grids import without
from ejktest.oracles.attention import Case, attention, visible
from ejktest.tolerance import check_close

Q, K, H, HK = 37, 70, 4, 2
SCALES = {
    "heads": ((2, H), (2, HK)),
    "blocks": ((2, H, 3), (2, HK, 5)),
    "blocks of queries": ((2, H, 2), (2, HK)),
}


def operands(d: int, dv: int):
    shapes = (2, Q, H, d), (2, K, HK, d), (2, K, HK, dv)
    return [normal(*shape, dtype=jnp.float8_e4m3fn) for shape in shapes]


def scale_of(*shape: int):
    return 0.5 + jax.random.uniform(jax.random.key(sum(shape)), shape)


def values(x, scale):
    scale = np.asarray(scale, np.float64)
    if scale.ndim == 3:
        block = -(-x.shape[1] // scale.shape[2])
        scale = scale[:, :, np.arange(x.shape[1]) // block].swapaxes(1, 2)[..., None]
    else:
        scale = scale[:, None, :, None]
    return np.asarray(x).astype(np.float64) * scale


CALLS = {
    "heads": (64, 32, {"causal": True, "causal_offset": 30}),
    "blocks": (32, 64, {"sliding_window": (20, 9)}),
    "blocks of queries": (96, 80, {}),
}


@pytest.mark.parametrize(
    ("scales", "capability"),
    without(itertools.product(SCALES, (80, 89)), ("heads", 89), ("blocks", 80)),
)
def test_against_oracle(scales: str, capability: int) -> None:
    """Converted to bfloat16 on one capability; with probabilities of 8 bits on the other."""
    d, dv, mask = CALLS[scales]
    arrays = operands(d, dv)
    factors = [*(scale_of(*shape) for shape in SCALES[scales]), scale_of(2, HK)]
    exact = [values(*pair).astype(np.float32) for pair in zip(arrays, factors, strict=True)]
    sinks = np.array([0.3], np.float32)
    case = Case(*exact, sinks=sinks, see=visible(2, Q, K, **mask))
    names = dict(zip(("q_scale", "k_scale", "v_scale"), factors, strict=True))
    cfg = {"fwd_params": {"q_blocksize": 32, "kv_blocksize": 32}}
    with interpret_mode(), compile_for(cuda_target(capability)):
        o, lse = flash_attention(
            *arrays, **names, **mask, softmax_aux=sinks, return_lse=True, out_dtype="float32",
            cfg=cfg,
        )  # fmt: skip
    reference = attention(case)
    check_close(lse, reference.lse, attention(case, plain=True).lse, name="lse")
    error, largest = np.abs(o - reference.o), np.abs(reference.o).max()
    rms = np.sqrt(np.mean(error**2) / np.mean(reference.o**2))
    narrow = capability == 89 and dv != 80
    # 3 bits of mantissa, of probabilities: 2.4% where values are random
    assert rms < (3e-2 if narrow else 4e-3), rms
    assert error.max() < (6e-2 if narrow else 1e-2) * largest


def test_an_output_of_another_dtype_and_its_gradients() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in operands(32, 32))

    def run(q, k, v):
        return flash_attention(q, k, v, causal=True, out_dtype=jnp.float32)

    with interpret_mode(), compile_for(cuda_target(80)):
        o, pull = jax.vjp(run, q, k, v)
        usual = flash_attention(q, k, v, causal=True)
        gradients = pull(jnp.ones_like(o))
    assert o.dtype == jnp.float32
    assert (o.astype(jnp.bfloat16) == usual).all()
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3


def test_no_gradient() -> None:
    q, k, v = operands(32, 32)

    def loss(scale):
        return flash_attention(q, k, v, q_scale=scale).astype(jnp.float32).sum()

    with (
        interpret_mode(),
        compile_for(cuda_target(89)),
        pytest.raises(KernelNotSupported, match="of 8 bits are for inference"),
    ):
        jax.grad(loss)(jnp.ones((2, H)))


@pytest.mark.parametrize(
    ("target", "d", "dtype"),
    [
        (cuda_target(89), 128, "float8_e4m3fn"),
        (cuda_target(89), 80, "bfloat16"),  # a part of 16 columns
        (cuda_target(80), 128, "bfloat16"),
        (rocm_target("gfx942"), 128, "bfloat16"),
    ],
    ids=str,
)
def test_matmuls_of_8_bits_where_the_hardware_has_them(target, d, dtype) -> None:
    arrays = {
        name: struct(1, 256, 2, d, dtype=jnp.float8_e4m3fn) for name in ("query", "key", "value")
    }
    with interpret_mode(), compile_for(target):
        call = bound(flash_attention.call, **arrays)
        assert flash_attention.supports(call) is None
        assert flash_attention.problem_of(call).dtype == dtype
