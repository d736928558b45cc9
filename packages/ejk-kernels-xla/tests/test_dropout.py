"""The dropout mask is the specified function of seed and indices, whatever the blocking."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.kernels.xla._common.dropout import Dropout, random_words, seed_words
from ejktest.oracles.attention import dropout_factor, hash_word


def test_check_words() -> None:
    first = Dropout.make(0, 1, 1, 1, 4)
    words = random_words(first.base, first.rows, first.cols)[0, 0, 0]
    assert words.tolist() == [1896943509, 1986166963, 2199446731, 3953725945]
    other = Dropout.make(7, 2, 4, 6, 11)
    words = random_words(other.base, other.rows, other.cols)[1, 3, 5, 9:]
    assert words.tolist() == [380952362, 711357368]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(-(2**40), 2**40),
    index=st.tuples(*[st.integers(0, 2**31 - 1)] * 4),
)
def test_words_equal_the_formula(seed: int, index: tuple[int, int, int, int]) -> None:
    b, h, i, j = index
    words = seed_words(jnp.asarray([np.uint32(seed & 0xFFFFFFFF), b, h, i, j], jnp.uint32))
    one = Dropout.make(words, 1, 1, 1, 1)
    got = int(random_words(one.base, one.rows, one.cols)[0, 0, 0, 0])
    assert got == hash_word(seed & 0xFFFFFFFF, b, h, i, j)


@pytest.mark.parametrize("prob", [0.1, 0.5, 0.999])
def test_a_shard_draws_what_the_whole_draws(prob: float) -> None:
    full_mask = Dropout.make(5, 4, 6, 9, 12).keep(prob)
    words = jnp.array([5, 2, 3, 4, 7], jnp.int32)
    part = Dropout.make(words, 2, 3, 4, 5)
    np.testing.assert_array_equal(part.keep(prob), full_mask[2:, 3:, 4:8, 7:])
    np.testing.assert_array_equal(full_mask, dropout_factor(prob, 5, full_mask.shape) > 0)


def test_seeds_are_taken_modulo_two_to_the_32() -> None:
    for seed in (-1, 2**32 - 1, jnp.int32(-1), jnp.uint32(2**32 - 1), np.int64(2**33 - 1)):
        assert int(seed_words(seed)[0]) == 2**32 - 1
    assert seed_words(None).tolist() == [0] * 5
