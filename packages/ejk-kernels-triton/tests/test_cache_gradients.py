"""Gradients of the kernels over caches: the reference receives every option of the call."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.triton.serving.implementation import (
    page_attention,
    ragged_decode_attention,
    ragged_page_attention,
)
from ejkernel.ops import interpret_mode, kernel_registry

H, D, PAGE = 2, 16, 16
Q, LENS = jnp.ones((1, H, D)), np.array([PAGE], np.int32)
TABLE, PAGES = np.zeros((1, 1), np.int32), jnp.ones((1, PAGE, H, D))
STARTS = np.array([0, 1], np.int32)
CALLS = {
    page_attention: (Q, PAGES, PAGES, LENS, TABLE),
    ragged_page_attention: (Q, jnp.ones((1, PAGE, 2 * H, D)), LENS, TABLE, STARTS, 1),
    ragged_decode_attention: (Q, PAGES, PAGES, LENS - PAGE, LENS),
}


class Reference:
    """Stands for the XLA implementation and keeps what it receives."""

    def run_canonical(self, **arguments):
        self.arguments = arguments
        (query,) = (arguments[name] for name in ("query", "queries") if name in arguments)
        return query * arguments["temperature"]


def with_temperature(kernel):
    """Returns the kernel of an operation with one option more, which it claims to read."""
    signature = inspect.signature(kernel.call.signature)
    option = inspect.Parameter("temperature", inspect.Parameter.KEYWORD_ONLY, default=1.0)

    def extended():
        raise NotImplementedError

    option = option.replace(annotation=float)
    extended.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])
    call = type("Extended", (kernel.call,), {"signature": staticmethod(extended)})
    changed = {"call": call, "reads": kernel.reads | {"temperature"}}
    return type("Kernel", (type(kernel),), changed)()


@pytest.mark.parametrize("kernel", CALLS, ids=lambda kernel: kernel.__name__)
def test_the_reference_receives_every_option(kernel, monkeypatch):
    extended, arrays, reference = with_temperature(kernel), CALLS[kernel], Reference()
    options = {"temperature": 3.0, "softmax_scale": 0.5, "logits_soft_cap": 8.0}
    options["sliding_window"] = (7, 0)
    monkeypatch.setattr(kernel_registry, "get", lambda *name: reference)
    with interpret_mode():
        gradient = jax.grad(lambda q: extended(q, *arrays[1:], **options).sum())(arrays[0])
    np.testing.assert_array_equal(gradient, 3.0)
    assert {name: reference.arguments[name] for name in options} == options
