"""8-bit attention: quantize_attention, its scales in flash_attention, errors and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejkernel.modules import (
    InvalidArgument,
    KernelNotSupported,
    flash_attention,
    quantize_attention,
)
from ejkernel.ops import AutotunePolicy, Autotuner, Invocation
from ejktest.drawn import normal
from ejktest.oracles.attention import Case, attention, gradients, visible
from ejktest.tolerance import check_close

SCALES = ("q_scale", "k_scale", "v_scale")


def operands(dtype=jnp.float32):
    shapes = (2, 21, 4, 16), (2, 30, 2, 16), (2, 30, 2, 8)
    return [normal(*shape, dtype=dtype) for shape in shapes]


def dequantized(x8, scale):
    """``x8 [b, n, h, d]`` times a scale: a number, ``[#b, #h]`` or ``[b, h, blocks]``."""
    x, scale = np.asarray(x8).astype(np.float64), np.asarray(scale).astype(np.float64)
    if scale.ndim == 3:
        block = -(-x.shape[1] // scale.shape[2])
        scale = scale[:, :, np.arange(x.shape[1]) // block].swapaxes(1, 2)[..., None]
    elif scale.ndim == 2:
        scale = scale[:, None, :, None]
    return x * scale


def eight_bit(**options):
    *arrays, q_scale, k_scale, v_scale = quantize_attention(*operands(), **options)
    return arrays, dict(zip(SCALES, (q_scale, k_scale, v_scale), strict=True))


@pytest.mark.parametrize("block", [None, 8, 7])
def test_values_are_within_half_a_step_of_the_input(block) -> None:
    q, k, v = operands()
    arrays, scales = eight_bit(block=block)
    for x, x8, (name, scale) in zip((q, k, v), arrays, scales.items(), strict=True):
        assert x8.dtype == jnp.float8_e4m3fn
        assert scale.dtype == jnp.float32
        blocks = () if block is None or name == "v_scale" else (-(-x.shape[1] // block),)
        assert scale.shape == (2, x.shape[2], *blocks)
        # 3 bits of mantissa, and subnormals of 2^-9 times the scale
        step = np.maximum(np.abs(x) / 16, dequantized(np.full_like(x, 2.0**-10), scale))
        assert (np.abs(dequantized(x8, scale) - np.asarray(x)) <= step * 1.0001).all()
        assert np.abs(np.asarray(x8).astype(np.float32)).max() == 448.0


def test_zeros_and_tiny_numbers_have_finite_scales() -> None:
    zero = jnp.zeros((1, 3, 1, 4))
    *arrays, q_scale, k_scale, v_scale = quantize_attention(zero, zero + 1e-36, zero)
    assert all((np.asarray(x).astype(np.float32) >= 0).all() for x in arrays)
    assert q_scale == v_scale == 1.0
    assert 0.0 < k_scale < 1e-37  # not a subnormal, which a CPU may take for 0


@pytest.mark.parametrize(
    ("block", "options"),
    [
        (None, {"causal": True, "softmax_aux": np.array([0.5], np.float32)}),
        (8, {"sliding_window": 9, "logits_soft_cap": 2.0, "return_lse": True}),
    ],
)
def test_an_8_bit_call_is_attention_of_the_values(block, options) -> None:
    arrays, scales = eight_bit(block=block)
    exact = [dequantized(x, s) for x, s in zip(arrays, scales.values(), strict=True)]
    mask = {name: x for name, x in options.items() if name in ("causal", "sliding_window")}
    case = Case(
        *(x.astype(np.float32) for x in exact), sinks=options.get("softmax_aux"),
        see=visible(2, 21, 30, **mask), cap=options.get("logits_soft_cap"),
    )  # fmt: skip
    reference, plain = attention(case), attention(case, plain=True)
    result = flash_attention(*arrays, **scales, **options, out_dtype="float32", platform="xla")
    if "return_lse" in options:
        result, lse = result
        check_close(lse, reference.lse, plain.lse, name="lse")
    check_close(result, reference.o, plain.o)
    rounded = flash_attention(*arrays, **scales, **options, platform="xla")
    rounded = rounded[0] if "return_lse" in options else rounded
    assert rounded.dtype == jnp.bfloat16
    assert (rounded == result.astype(jnp.bfloat16)).all()


def test_smoothing_keeps_the_output() -> None:
    q, k, v = operands()
    k = k + 30.0 * (jnp.arange(16) == 3)
    exact = attention(Case(q, k, v)).o
    errors = {}
    for smooth in (False, True):
        *arrays, q_scale, k_scale, v_scale = quantize_attention(q, k, v, smooth=smooth)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        o = flash_attention(*arrays, **scales, out_dtype="float32", platform="xla")
        errors[smooth] = np.sqrt(np.mean((o - exact) ** 2) / np.mean(exact**2))
    assert errors[True] < 0.05 < errors[False]


@pytest.mark.parametrize("scale", ["number", "heads", "blocks"])
def test_wider_inputs_are_multiplied_by_their_scales(scale) -> None:
    q, k, v = operands()
    factors = {
        "number": lambda h: 0.75,
        "heads": lambda h: 0.5 + jnp.arange(2.0 * h).reshape(2, h) / 16,
        "blocks": lambda h: 0.5 + jnp.arange(8.0 * h).reshape(2, h, 4) / 8,
    }
    q_scale, k_scale = (factors[scale](h) for h in (4, 2))
    v_scale = factors["number" if scale == "blocks" else scale](2)
    scales = (q_scale, k_scale, v_scale)

    def run(q, k, v, *scales):
        return flash_attention(q, k, v, **dict(zip(SCALES, scales, strict=True)), platform="xla")

    pairs = zip((q, k, v), scales, strict=True)
    case = Case(*(dequantized(x, s).astype(np.float32) for x, s in pairs))
    o, pull = jax.vjp(run, q, k, v, *scales)
    check_close(o, attention(case).o, attention(case, plain=True).o)
    do = normal(*o.shape, dtype=jnp.float32)
    exact, grads = gradients(case, do), pull(do)
    for i, dx in enumerate((exact.dq, exact.dk, exact.dv)):
        check_close(grads[i], dequantized(dx, scales[i]), rms_limit=1e-4)
        if scale == "heads":
            of_scale = (dx * np.asarray((q, k, v)[i])).sum((1, 3))
            check_close(grads[3 + i], of_scale, rms_limit=1e-4)


def test_the_output_has_the_dtype_that_is_asked_for() -> None:
    q, k, v = operands(jnp.bfloat16)
    wide = flash_attention(q, k, v, out_dtype=jnp.float32, platform="xla")
    case = Case(*(np.asarray(x).astype(np.float32) for x in (q, k, v)))
    assert wide.dtype == jnp.float32
    assert (wide.astype(jnp.bfloat16) == flash_attention(q, k, v, platform="xla")).all()
    error = np.abs(np.asarray(wide) - attention(case).o).max()
    assert error < 2.0**-8  # of probabilities in bfloat16, of the output's own none
    grads = jax.grad(lambda q: flash_attention(q, k, v, out_dtype=jnp.float32).sum())(q)
    assert grads.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["query", *SCALES])
def test_an_8_bit_call_has_no_gradient(name) -> None:
    (q, k, v), scales = eight_bit()
    arguments = {"query": q, "key": k, "value": v, **scales}

    def loss(x):
        return flash_attention(**{**arguments, name: x}).astype(jnp.float32).sum()

    with pytest.raises(KernelNotSupported, match=r"^flash_attention: .* of 8 bits"):
        jax.grad(loss)(arguments[name])


WRONG = {
    "key: expected float8_e4m3fn": {"key": jnp.zeros((2, 30, 2, 16))},
    "q_scale: expected float or": {"q_scale": jnp.ones(4)},
    "k_scale: expected float or": {"k_scale": jnp.ones((2, 4))},
    r"k_scale: expected .* of at least one block": {"k_scale": jnp.ones((2, 2, 0))},
    "v_scale: expected float or": {"v_scale": jnp.ones((2, 2, 3))},
    "out_dtype: expected a floating-point dtype of at least 16": {"out_dtype": "float8_e4m3fn"},
    "q_scale: given inf": {"q_scale": float("inf")},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message) -> None:
    (q, k, v), scales = eight_bit()
    call = {"query": q, "key": k, "value": v, **scales, **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        flash_attention(**call)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", {"query": jnp.zeros((2, 21, 4, 16), jnp.float8_e4m3fn)}),
        ("key", {"key": jnp.zeros((2, 30, 2, 8))}),
        ("value", {"value": jnp.zeros((2, 29, 2, 8))}),
        ("block", {"block": 0}),
        ("block", {"block": 2.0}),
        ("smooth", {"smooth": 1}),
    ],
)
def test_wrong_arguments_of_quantize_attention_are_named(name, change) -> None:
    call = dict(zip(("query", "key", "value"), operands(), strict=True))
    with pytest.raises((InvalidArgument, ValueError), match=f"^{name}: "):
        quantize_attention(**{**call, **change})


def test_under_vmap_and_jit() -> None:
    arrays, scales = eight_bit(block=8)
    call = jax.jit(lambda *x: flash_attention(*x[:3], **dict(zip(SCALES, x[3:], strict=True))))
    both = (*arrays, *scales.values())
    mapped = jax.vmap(call)(*(jnp.stack([x, x[::-1]]) for x in both))
    assert (mapped[1][::-1] == call(*both)).all()


@pytest.mark.parametrize("validate_backward", [None, True])
def test_tuning_a_call_of_8_bits_times_what_it_has(validate_backward):
    """Scales are floats, but nothing of attention, and of a grouped matmul only the rows."""
    policy = AutotunePolicy(num_warmup=0, num_iters=1, validate_backward=validate_backward)
    x = jnp.ones((1, 32, 2, 16), jnp.float8_e4m3fn)
    scale, bias = jnp.ones((1, 2)), jnp.zeros((1, 2, 32, 32))
    attend = Invocation(modules.FlashAttention(), (x, x, x, bias), {"k_scale": scale})
    configs = [modules.FlashAttentionConfig("xla", fwd_params={"q_blocksize": 16})]
    result = Autotuner(policy).tune(attend, configs)
    assert not result.backward and result.timed == 2, result.trials

    lhs, rhs = jnp.ones((32, 16)), jnp.ones((2, 16, 16), jnp.int8)
    product = (lhs, rhs, jnp.full(2, 16))
    served = Invocation(modules.GroupedMatmul(), product, {"rhs_scale": jnp.ones(2)})
    configs = [modules.GroupedMatmulConfig("xla")]
    result = Autotuner(policy).tune(served, configs)
    assert result.backward == (validate_backward is True) and result.best is not None
