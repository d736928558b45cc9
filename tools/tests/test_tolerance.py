"""The tolerances' own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from ejktest.attention import Call, arrays, oracle_case
from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plain_computation_is_the_same_on_every_machine(monkeypatch, dtype) -> None:
    """Functions that numpy computes differently by processor, in float32, are not used."""
    call = Call("all", q=12, k=12, cap=2.0, sinks=(4, 2), bias=(1, 4), dtypes=(dtype,) * 3)
    x = arrays(call)
    case = oracle_case(call, x)
    for name in ("matmul", "exp", "tanh", "log"):
        original = getattr(np, name)

        def wide(*args, original=original, name=name):
            assert all(a.dtype == np.float64 for a in args), name
            return original(*args)

        monkeypatch.setattr(np, name, wide)
    plain, exact = oracle.attention(case, plain=True), oracle.attention(case)
    assert plain.o.dtype == dtype and plain.lse.dtype == np.float32
    error = np.abs(plain.o.astype(np.float64) - exact.o).max()
    assert 0 < error < (1e-6 if dtype == "float32" else 3e-2)
    assert oracle.gradients(case, x["do"], plain=True).dq.dtype == dtype


def test_sums_are_taken_in_several_orders() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 1, 64)).astype(np.float32)
    sums = {float(oracle.summed_in_order(a, b.T, order)[0, 0]) for order in range(oracle.ORDERS)}
    assert len(sums) > 1
    np.testing.assert_allclose(list(sums), float((a @ b.T)[0, 0]), rtol=1e-4, atol=1e-5)


def test_what_the_inputs_cost_the_plain_computation_is_allowed_twice() -> None:
    """The root-mean-square bound follows an ill-conditioned case, and ends there."""
    good = np.random.default_rng(0).standard_normal(1000)
    usual = good * (1 + 1e-4)
    check_close((good * (1 + 1.9e-4)).astype(np.float32), good, usual)
    with pytest.raises(AssertionError, match=r"error above|rms ratio above"):
        check_close((good * (1 + 2.2e-4)).astype(np.float32), good, usual)
    usual[0] += 1  # one large error of the plain computation excuses no others
    with pytest.raises(AssertionError, match="rms ratio above"):
        check_close((good + 0.9).astype(np.float32), good, usual)
