"""cuDNN on a GPU: the calls it accepts have the same answer as everywhere, gradients repeat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.xla import cudnn
from ejktest.attention import Call, arrays, oracle_case
from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close

pytestmark = pytest.mark.gpu
BF16 = ("bfloat16",) * 3

CALLS = [
    Call("full", q=128, k=192, d=64, hk=1, dtypes=BF16),
    Call("causal_odd", q=65, k=193, d=128, hk=2, mask={"causal": True}, dtypes=BF16),
    Call("window", q=200, k=200, mask={"causal": True, "sliding_window": 17}, dtypes=BF16),
    Call("left_window", q=190, k=200, d=80, mask={"sliding_window": (17, 0)}, dtypes=BF16),
    Call("float16", q=192, k=192, d=256, mask={"causal": True}, dtypes=("float16",) * 3),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_against_oracle(call: Call) -> None:
    x = arrays(call)

    @jax.jit
    def both(q, k, v, do):
        o, vjp = jax.vjp(lambda *a: cudnn.flash_attention(*a, **call.mask), q, k, v)
        return o, *vjp(do)

    given = [jnp.asarray(x[n]) for n in ("q", "k", "v", "do")]
    first, again = both(*given), both(*given)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    case = oracle_case(call, x)
    good, plain = oracle.attention(case), oracle.attention(case, plain=True)
    check_close(first[0], good.o, plain.o, name="o")
    good = oracle.gradients(case, x["do"])
    plain = oracle.gradients(case, x["do"], plain=True)
    for name, g in zip(("dq", "dk", "dv"), first[1:], strict=True):
        check_close(g, getattr(good, name), getattr(plain, name), name=name)
