"""Attention calls whose logits are large finite numbers, for every backend.

Only -inf and structure hide a key; a finite logit of any size is a number. Where logits are so
large that their rounding decides (-1e10 is rounded to a multiple of 1024), the answer is the
softmax of the rounded logits: keys that share a bias of -1e10 share the row evenly. The sizes here
are such that every order of computing a logit rounds it to the same number, or leaves one key so
far above the others that rounding cannot matter.

A case puts one magnitude into each batch row (biases) or head (sinks), so that one compiled program
tries them all. A backend's test file opts in by name::

    @pytest.mark.parametrize("case", large_logits.CASES, ids=str)
    def test_large_logits(case):
        large_logits.check(case, operation)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ejktest.attention_cases import Call, arrays, oracle_case, run
from ejktest.oracles import attention as oracle
from ejktest.tolerance import EPS, as_float64

MIN, MAX = (float(x) for x in (np.finfo(np.float32).min, np.finfo(np.float32).max))
BIASES = (-1e10, -1e12, -1e30, -2.3e38, -3e38, MIN, MAX, 1e10)
SINKS = ((1e10, 1e10), (-1e10, 0.5), (MIN, -1e30), (MAX, MAX))
KEPT = 9  # keys without a bias, in the rows that keep any


@dataclass(frozen=True)
class Case:
    """``change`` edits the arrays of ``call`` in place; ``per`` names the axis of magnitudes."""

    call: Call
    change: Callable[[dict[str, Any]], None]
    per: str = "batch row"

    def __str__(self) -> str:
        return self.call.name


def padding(x: dict[str, Any], biases: tuple[float, ...] = BIASES) -> None:
    """An additive mask ``[b, 1, q, k]``: the last keys of every row and, for padded queries
    (odd rows), all of them."""
    bias = np.zeros_like(x["bias"])
    for row, value in enumerate(biases):
        bias[row, :, :, KEPT:] = value
        bias[row, :, 1::2] = value
    x["bias"] = bias


def narrow_padding(x: dict[str, Any]) -> None:
    """The same in float16, with its smallest number."""
    padding(x, (float(np.finfo(np.float16).min),) * len(BIASES))
    x["bias"] = x["bias"].astype(np.float16)


def sinks(x: dict[str, Any]) -> None:
    x["sinks"] = np.array(SINKS, x["sinks"].dtype)


def inputs(x: dict[str, Any]) -> None:
    """One key of each row stands out by far: rounding cannot choose another."""
    for name in ("q", "k"):
        x[name] = (1e5 * np.sign(as_float64(x[name]))).astype(x[name].dtype)
    x["k"][:, 3] = x["q"][:, 0, : x["k"].shape[2]]


def nothing(x: dict[str, Any]) -> None:
    pass


BASE = Call("", b=len(BIASES), q=6, k=36, h=2, hk=2, d=16, blocks=(16, 16), bias=(len(BIASES), 1))
ONE = replace(BASE, b=1, h=4, bias=None)
BF16 = ("bfloat16",) * 3

CASES = (
    Case(replace(BASE, name="bias"), padding),
    Case(replace(BASE, name="bias_bfloat16", dtypes=BF16, d=32), padding),
    Case(replace(BASE, name="bias_cap_sinks", cap=5.0, sinks=(2, 1)), padding),
    Case(replace(BASE, name="bias_causal", mask={"causal": True, "causal_offset": 30}), padding),
    Case(replace(BASE, name="bias_float16"), narrow_padding),
    Case(replace(ONE, name="sinks", sinks=(4, 2)), sinks, "head"),
    Case(replace(ONE, name="inputs", q=1, hk=4), inputs, "head"),
    Case(replace(ONE, name="scale", scale=1e10, d=32), nothing, "head"),
)


def walks(unit: float, blocks: int, rows: int = 64, block: int = 16) -> np.ndarray:
    """Float32 numbers ``[rows, blocks * block]`` whose maxima rise and fall from block to block.

    They wander across the size from which rows take another slope, in both directions, with
    neighbours one rounding apart, and each block holds keys that tie. Times ``unit`` all of them
    are finite logits.
    """
    rng = np.random.default_rng(0)
    top = np.float32(min(MAX / max(unit, 1.0), MAX))
    limit = np.float32(2.0**30 / (unit * np.log2(np.e)))
    sizes = [np.float32(1.0), np.float32(2.0**24), np.float32(2.0**40), top]
    sizes += [limit * np.float32(x) for x in (0.1, 0.7, 1.4, 3.0)]
    for direction in (np.float32(0.0), top):
        x = limit
        for _ in range(3):
            sizes.append(x)
            x = np.nextafter(x, direction)
    levels = np.array([sign * x for x in sizes for sign in (-1.0, 1.0)], np.float32)
    near = rng.choice(levels, (rows, 1, 1))
    near = np.nextafter(near, rng.choice(levels, (rows, blocks, 1)))
    far = rng.choice(levels, (rows, blocks, 1))
    x = np.where(np.arange(rows)[:, None, None] % 2, near, far)
    below = np.nextafter(x, np.float32(-MAX))
    lower = np.where(rng.random((rows, blocks, block)) < 0.5, below, -top)
    return np.where(rng.random(lower.shape) < 0.3, x, lower).reshape(rows, -1)


def natural(case: Case, x: dict[str, Any]) -> dict[str, float]:
    """What one unit of each result's arithmetic is worth: the size of its summands."""
    call = case.call
    q, k, v, do = (as_float64(x[n]) for n in ("q", "k", "v", "do"))
    sizes = {n: float(np.abs(a).max()) for n, a in (("q", q), ("k", k), ("v", v), ("do", do))}
    v = np.repeat(v, call.h // call.hk, axis=2)
    dx = 2 * float(np.abs(np.einsum("bqhc,bkhc->bhqk", do, v)).max()) + np.abs(x["dlse"]).max()
    scale = abs(call.d**-0.5 if call.scale is None else call.scale)
    sizes |= {"o": sizes["v"], "lse": 1.0, "dv": sizes["do"], "dbias": dx}
    return sizes | {"dq": scale * dx * sizes["k"], "dk": scale * dx * sizes["q"], "dsinks": dx}


def check(case: Case, function: Any) -> None:
    """``function`` (arguments as flash_attention's) against the oracle, with return_lse."""
    call = case.call
    x = arrays(call)
    case.change(x)
    o, lse, grads = run(function, call, x)
    rounded = replace(oracle_case(call, x), logits=np.float32)
    good, grad = oracle.attention(rounded), oracle.gradients(rounded, x["do"], x["dlse"])
    sizes = natural(case, x)
    results = {"o": (o, good.o), "lse": (lse, good.lse)}
    results |= {f"d{n}": (g, getattr(grad, f"d{n}")) for n, g in grads.items()}
    narrow = call.dtypes[0] != "float32"
    # rounding of logits that are neither small nor lost: those of the float16 bias
    moved = 2.0**-5 if case.change is narrow_padding else 0.0
    wrong = []
    for name, (actual, expected) in results.items():
        bound = 64 * EPS["float32"] if name == "lse" or not narrow else 4 * EPS[call.dtypes[0]]
        bound = bound + moved
        if name == "lse":
            bound = bound * np.maximum(np.abs(expected), 1.0)
        a = as_float64(actual)
        error = np.abs(np.where(a == expected, 0.0, a - expected)) / sizes[name]
        bad = ~(error <= bound)  # NaN is bad
        axis = 0 if case.per == "batch row" or name == "dsinks" else 2
        if bad.any():
            rows = np.flatnonzero(bad.any(tuple(i for i in range(a.ndim) if i != axis))).tolist()
            finite = error[np.isfinite(error)].max(initial=0.0)
            nans = int(np.isnan(a).sum())
            wrong.append(
                f"{name}: {case.per} {rows}: {finite:.3g} of {np.max(bound):.3g}, {nans} NaN"
            )
    assert not wrong, "\n".join(wrong)
