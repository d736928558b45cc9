"""The gated delta rule on a GPU: real tiles against float64, and two runs alike."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.cases.delta import check_delta
from ejktest.cases.delta import delta_arguments as make
from ejktest.cases.linear import cotangents
from ejktest.oracles import delta as oracle
from ejktest.tolerance import check_close

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import gated_delta_rule

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16", "float32")
CU = [0, 100, 100, 101, 357, 640]


@partial(jax.jit, static_argnames="options")
def differentiate(args, cu_seqlens=None, options=()):
    """Output, state and gradients of every argument."""

    def apply(args):
        return gated_delta_rule(**args, cu_seqlens=cu_seqlens, return_state=True, **dict(options))

    out, back = jax.vjp(apply, args)
    return *out, back(cotangents(*out))[0]


def check(args, cu=None, **options):
    static = tuple(options.items())
    actual, again = (differentiate(args, cu, static) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, actual, again)
    dtype = args["query"].dtype
    check_delta(args, actual, state_dtype=dtype, cu_seqlens=cu, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dims", "cu", "reverse"),
    [
        (dict(b=2, s=256, h=4, hk=2, dk=128, dv=128), None, False),
        (dict(b=1, s=300, h=2, hk=2, dk=128, dv=64), None, True),
        (dict(b=1, s=320, h=2, hk=1, dk=64, dv=64), None, True),
        (dict(b=1, s=700, h=2, hk=1, dk=128, dv=128), CU, False),
        (dict(b=1, s=700, h=2, hk=2, dk=64, dv=64), CU, True),
        (dict(b=1, s=200, h=3, hk=1, dk=80, dv=96), None, False),
    ],
)
def test_against_float64(dims, cu, reverse, dtype):
    states = None if cu is None else len(cu) - 1
    cu = None if cu is None else np.asarray(cu, np.int32)
    check(make("head", **dims, states=states, dtype=dtype), cu, reverse=reverse, normalize_qk=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [-0.001, -50.0])
def test_slow_and_fast_decays_match_the_reference(level, dtype):
    """Runs of tokens that hardly decay, between tokens at ``level``; all keys without gates."""
    args = make("head", b=1, s=256, h=2, hk=1, dk=128, dv=128, dtype=dtype)
    args["g"] = jnp.where(jnp.arange(256)[None, :, None] % 7 < 3, level, args["g"] * 1e-2)
    check({**args, "g": args["g"].astype(dtype)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equal_keys_with_beta_of_two(dtype):
    """No gates: one direction of the state is reflected by every token."""
    args = make("head", b=1, s=512, h=2, hk=2, dk=64, dv=64, dtype=dtype)
    args["key"] = jnp.broadcast_to(args["key"][:, :1], args["key"].shape)
    args |= {"beta": jnp.full_like(args["beta"], 2.0), "g": jnp.zeros_like(args["g"])}
    o = gated_delta_rule(**args, normalize_qk=True)
    want = oracle.gated_delta_rule(**args, normalize_qk=True)
    if dtype == "float32":
        # two roundings of beta |k|^2, that of the length and that of the product, move the exact
        # result as far as float32 may be off: no reflection forgets them
        beta = np.asarray(args["beta"]).astype(np.float64) * (1 + 2.0**-22)
        plain = oracle.gated_delta_rule(**{**args, "beta": beta}, normalize_qk=True)
        check_close(o, want.o, plain.o)
    else:
        # every chunk rounds its updates to the dtype of the matmuls
        check_close(o, want.o, rms_limit=8e-2)


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("cu", [None, [0, 1, 1, 2, 4]])
def test_a_few_tokens(cu, state):
    """Token after token, in the memory of a float32 state that is given away."""
    dims = dict(h=4, hk=2, dk=128, dv=128, dtype="bfloat16")
    args = make("head", b=5 if cu is None else 1, s=4, states=5 if cu is None else 4, **dims)
    cu = None if cu is None else np.asarray(cu, np.int32)
    want = oracle.gated_delta_rule(**args, cu_seqlens=cu, normalize_qk=True)
    given = args.pop("initial_state").astype(state)

    def run(given, args, cu):
        return gated_delta_rule(
            **args, initial_state=given, cu_seqlens=cu, return_state=True, normalize_qk=True
        )

    step = jax.jit(run, donate_argnums=0)
    program = step.lower(given, args, cu).compile().as_text()
    o, final = step(given + 0, args, cu)
    check_close(o, want.o)
    check_close(final, want.state)
    shape = ",".join(map(str, given.shape))
    assert f"f32[{shape}]{{3,2,1,0}} copy(" not in program
