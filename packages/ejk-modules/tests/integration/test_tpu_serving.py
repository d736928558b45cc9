"""TPU kernels that serve have the gradients of XLA."""

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels import xla
from ejkernel.kernels.pallas.tpu.page_attention.implementation import page_attention
from ejktest.device import interpreted_tpu


def test_gradients_of_decoding():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((2, 4, 128), *[(4, 16, 1, 128)] * 2))
    lens, tables = np.array([20, 5]), np.array([[3, 1], [0, 2]])

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: (function(*x, lens, tables) ** 2).sum(), (0, 1, 2)))

    want = gradients(xla.page_attention)(q, k, v)
    with interpreted_tpu(pltpu.InterpretParams()):
        found = gradients(page_attention)(q, k, v)
    for got, other in zip(found, want, strict=True):
        np.testing.assert_allclose(got, other, rtol=1e-4, atol=1e-4)
