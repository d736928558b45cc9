"""Block-sparse attention on a GPU at real sizes: values, gradients, repeatability."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest import at_size
from ejktest.cases.attention import SPARSE

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import blocksparse_attention, flash_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SPARSE)
def test_against_float32(name: str) -> None:
    """o, lse and all gradients; the second run has the same bits."""
    at_size.check(SPARSE[name], blocksparse_attention)


def test_a_pattern_of_all_has_the_bits_of_dense_attention() -> None:
    """Both lists visit the same tiles in the same order."""
    q, k, v = at_size.small()
    every = jnp.ones((3, 3), bool)

    def gradients(f):
        def loss(*x):
            return (f(*x).astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    mine = gradients(lambda *x: blocksparse_attention(*x, block_mask=every))
    jax.tree.map(np.testing.assert_array_equal, mine, gradients(flash_attention))
