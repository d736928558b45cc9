"""Levels of JAX's precision, and values rounded to a narrow dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types.arrays import precision_level, quantise, quantised_values

HIGH, F32 = jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.F32_F32_F32


@pytest.mark.parametrize(
    ("given", "level"),
    [
        (None, "default"),
        ("bfloat16", "default"),
        ("tensorfloat32", "high"),
        (HIGH, "high"),
        ("highest", "highest"),
        (("default", HIGH), "high"),
        (F32, None),
        (("highest", "F32_F32_F32"), None),
    ],
)
def test_level_of_a_precision(given, level) -> None:
    assert precision_level(given, "float32") == level
    assert precision_level(given, "bfloat16") == "default"  # products of it are exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_algorithm_is_no_level(dtype) -> None:
    """A DotAlgorithm is a tuple, but not one of two levels."""
    sums = jax.lax.DotAlgorithm(np.float16, np.float16, np.float16)
    assert precision_level(sums, dtype) is None
    assert precision_level((sums, sums), dtype) is None


def test_compilers_keep_the_rounding_of_quantised_values():
    """XLA on GPUs drops a conversion to float8 that is converted back; not across a barrier."""

    def round_trip(x):
        return quantise(x, 0.5, jnp.float8_e4m3fn).astype(x.dtype)

    x = jnp.asarray([[[1.0, 1.03, -700.0]]])
    np.testing.assert_array_equal(jax.jit(round_trip)(x), [[[2.0, 2.0, -448.0]]])
    converted, kept = jax.jit(round_trip).lower(x).as_text().split("optimization_barrier")
    assert "f8E4M3FN" in converted and "f32" in kept


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_gradients_do_not_see_that_values_are_rounded(dtype):
    x = jnp.asarray([[[0.3, 1.03, -1e6]], [[2.9, 1e-3, 1e-9]]], jnp.bfloat16)
    scale = jnp.float32(0.5)
    values = quantised_values(x, scale, dtype)
    assert values.dtype == x.dtype
    np.testing.assert_array_equal(values, quantise(x, scale, dtype).astype(x.dtype))
    weights = jnp.float32(1.03)  # no 8-bit float
    gradient = jax.grad(lambda x: (quantised_values(x, scale, dtype) * weights).sum())(
        x.astype(jnp.float32)
    )
    expected = np.full(x.shape, 2.06, np.float32)
    expected[0, 0, 2] = 0.0  # clipped
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
