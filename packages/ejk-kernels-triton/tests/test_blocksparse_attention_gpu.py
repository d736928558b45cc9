"""Block-sparse attention on a GPU at real sizes: values, gradients, repeatability."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest import attention_at_size as cases

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import blocksparse_attention, compat, flash_attention
from ejkernel.kernels.triton.targets import current_target
from ejktest.ahead import in_parallel, lower_case

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def known(request: pytest.FixtureRequest):
    """Name -> inputs and reference of every case of this run, its kernels compiled."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    compat.toolchain()
    names = cases.names_in_run(request)
    with ThreadPoolExecutor(4) as pool:
        found = {name: pool.submit(cases.expected, name) for name in names}
        in_parallel((lower_case, name, current_target(), blocksparse_attention) for name in names)
        yield found


@pytest.mark.parametrize("name", cases.SPARSE)
def test_against_float32(name: str, known) -> None:
    """o, lse and all gradients; the second run has the same bits."""
    found = cases.check(name, blocksparse_attention, known.pop(name).result())
    cases.assert_sound(name, *found)


def test_a_pattern_of_all_has_the_bits_of_dense_attention(known) -> None:
    """The same tiles in the same order."""
    q, k, v = cases.small()
    every = jnp.ones((3, 3), bool)

    def gradients(f):
        return jax.jit(
            jax.value_and_grad(lambda *x: (f(*x).astype(jnp.float32) ** 2).sum(), (0, 1, 2))
        )

    mine = gradients(lambda *x: blocksparse_attention(*x, block_mask=every))(q, k, v)
    dense = gradients(flash_attention)(q, k, v)
    jax.tree.map(np.testing.assert_array_equal, mine, dense)
