"""short_decode next to the XLA implementation, in a registry that holds both."""

import jax
import numpy as np
import pytest

import ejkernel.kernels.xla as xla
import short_decode
from ejkernel.modules import RaggedDecodeAttention
from ejkernel.ops import ConfigSelectorChain, Executor, KernelRegistry

registry = KernelRegistry()
xla.register(registry)
short_decode.register(registry)
kernel = RaggedDecodeAttention(registry=registry)
executor = Executor(ConfigSelectorChain(autotune=False))

rng = np.random.default_rng(0)
q = rng.standard_normal((3, 4, 8), dtype=np.float32)
k, v = rng.standard_normal((2, 3, 6, 2, 8), dtype=np.float32)
slices = (np.array([2, 0, 4]), np.array([6, 6, 4]))


def gradients(f):
    def loss(q, k, v):
        return (f(q, k, v, *slices) ** 2).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="short_decode runs on CPUs")
def test_it_is_chosen_for_calls_that_it_supports():
    assert executor.explain(kernel, q, k, v, *slices).implementation.endswith("/cpu")
    capped = executor.explain(kernel, q, k, v, *slices, logits_soft_cap=5.0)
    reason = "logits_soft_cap: not implemented"
    assert ("ragged_decode_attention/xla/cpu", reason) in capped.skipped


def test_values_are_those_of_the_xla_implementation():
    ours = executor(kernel, q, k, v, *slices)
    np.testing.assert_allclose(ours, xla.ragged_decode_attention(q, k, v, *slices), atol=1e-6)


def test_gradients_are_those_of_the_xla_implementation():
    ours = gradients(lambda *arrays: executor(kernel, *arrays))
    for a, b in zip(ours, gradients(xla.ragged_decode_attention), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
