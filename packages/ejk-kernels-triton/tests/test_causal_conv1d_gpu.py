"""The causal convolution on a GPU: real tiles against float64, and two runs alike."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from ejktest.cases.convolution import check_convolution
from ejktest.cases.convolution import convolution_arguments as make
from ejktest.cases.linear import cotangents

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import causal_conv1d

pytestmark = pytest.mark.gpu


@partial(jax.jit, static_argnames="activation")
def differentiate(args, cu_seqlens=None, activation=None):
    """Output, state and gradients of every argument."""

    def convolve(args):
        return causal_conv1d(
            **args, cu_seqlens=cu_seqlens, activation=activation, return_state=True
        )

    out, back = jax.vjp(convolve, args)
    return *out, back(cotangents(*out))[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("b", "s", "c", "width", "cu"),
    [
        (2, 1000, 512, 4, None),
        (1, 4096, 1030, 2, None),
        (3, 333, 130, 8, None),
        (64, 1, 512, 4, None),
        (1, 1100, 512, 4, [0, 0, 1, 3, 131, 512, 1024, 1090]),
    ],
)
def test_against_float64(b, s, c, width, cu, dtype):
    states = None if cu is None else len(cu) - 1
    cu = None if cu is None else np.asarray(cu, np.int32)
    args = make(b=b, s=s, c=c, width=width, states=states, dtype=dtype)
    activation = "silu" if width == 4 else None
    found = differentiate(args, cu, activation)
    again = differentiate(args, cu, activation)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    check_convolution(args, found, cu_seqlens=cu, activation=activation)
