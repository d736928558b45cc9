"""What JAX's precision asks for, as backends that have three levels are told."""

import jax
import numpy as np
import pytest

from ejkernel.types.arrays import precision_level

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
