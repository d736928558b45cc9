"""Kernels inside a model that is copied, or sent to another process."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import xla
from ejkernel.modules import FlashAttention, create_default_executor, flash_attention
from ejkernel.modules._table import OPERATIONS, operation_class
from ejkernel.ops import kernel_registry
from ejkernel.ops.execution.freeze import kernel_identity

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


class Layer:
    """Stands for a module of a model."""


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_the_same_call_afterwards(name, how):
    kernel = operation_class(name)()
    other = COPIES[how](kernel)
    assert other is not kernel and kernel_identity(other) == kernel_identity(kernel)
    assert other.registry is kernel_registry and other.signature == kernel.signature


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_implementations_are_found_by_name_afterwards(name, how):
    algorithm = operation_class(name).spec.algorithm
    for implementation in kernel_registry.list_implementations(algorithm):
        other = COPIES[how](implementation)
        assert other.name == implementation.name and not other.loaded
        if implementation.platform == "xla":
            assert other.fn is implementation.fn is COPIES[how](implementation.fn)


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_model_gives_the_same_results(how):
    q = jnp.ones((1, 16, 2, 16), jnp.float32)
    layer = Layer()
    layer.attention, layer.executor = FlashAttention(), create_default_executor(autotune=False)
    layer.function, layer.backend = flash_attention, xla.flash_attention
    expected = layer.executor(layer.attention, q, q, q, platform="xla")
    other = COPIES[how](layer)
    np.testing.assert_array_equal(
        other.executor(other.attention, q, q, q, platform="xla"), expected
    )
    assert other.function is flash_attention and other.backend is layer.backend
