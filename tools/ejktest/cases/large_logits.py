"""Attention calls whose logits are large and finite, for every backend.

Only -inf and structure hide a key; a finite logit of any size takes part. Where logits are so
large that their rounding decides (-1e10 is rounded to a multiple of 1024), the answer is the
softmax of the rounded logits: keys that share a bias of -1e10 share the row evenly. The sizes here
are such that every order of computing a logit rounds it to the same value, or leaves one key so
far above the others that rounding cannot matter.

A case puts one magnitude into each batch row (biases) or head (sinks), so that one compiled program
tries them all. A backend's test file opts in by name::

    @pytest.mark.parametrize("case", large_logits.CASES, ids=str)
    def test_large_logits(case):
        large_logits.check(case, operation)

``AT_SIZE`` has cases of a GPU's kernels at their tiles, for ``check_at_size``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ejktest.at_size import BOUND
from ejktest.attention import Call, arrays, oracle_case, run
from ejktest.oracles import attention as oracle
from ejktest.tolerance import EPS, as_float64

MIN, MAX = (float(x) for x in (np.finfo(np.float32).min, np.finfo(np.float32).max))
BIASES = (-1e10, -1e12, -1e30, -2.3e38, -3e38, MIN, MAX, 1e10)
SINKS = ((1e10, 1e10), (-1e10, 0.5), (MIN, -1e30), (MAX, MAX))


@dataclass(frozen=True)
class Case:
    """``change`` edits the arrays of ``call`` in place; ``per`` names the axis of magnitudes."""

    call: Call
    change: Callable[[dict[str, Any]], None]
    per: str = "batch row"

    def __str__(self) -> str:
        return self.call.name


def padding(x: dict[str, Any], biases: tuple[float, ...] = BIASES) -> None:
    """Sets an additive mask ``[b, 1, q, k]``: the last keys of every row and, for padded queries
    (odd rows), all of them."""
    bias = np.zeros_like(x["bias"])
    for row, value in enumerate(biases):
        bias[row, :, :, bias.shape[-1] // 4 :] = value
        bias[row, :, 1::2] = value
    x["bias"] = bias


def narrow_padding(x: dict[str, Any]) -> None:
    """Sets the same in float16, with its smallest value."""
    padding(x, (float(np.finfo(np.float16).min),) * len(BIASES))
    x["bias"] = x["bias"].astype(np.float16)


def sinks(x: dict[str, Any], values: tuple[tuple[float, float], ...] = SINKS) -> None:
    x["sinks"] = np.array(values, x["sinks"].dtype)


def inputs(x: dict[str, Any]) -> None:
    """Makes one key of each row stand out by far: rounding cannot choose another."""
    for name in ("q", "k"):
        x[name] = (1e5 * np.sign(as_float64(x[name]))).astype(x[name].dtype)
    x["k"][:, 3] = x["q"][:, 0, : x["k"].shape[2]]


def align_keys(x: dict[str, Any], size: float) -> None:
    """Makes each row's own key stand out: all have one length, and queries are keys."""
    k = as_float64(x["k"])
    k *= size * k.shape[-1] ** 0.5 / np.linalg.norm(k, axis=-1, keepdims=True)
    x["q"] = x["k"] = k.astype(x["k"].dtype)


def nothing(x: dict[str, Any]) -> None:
    pass


BASE = Call("", b=len(BIASES), q=6, k=36, h=2, hk=2, d=16, blocks=(16, 16), bias=(len(BIASES), 1))
ONE = replace(BASE, b=1, h=4, bias=None)
BF16 = ("bfloat16", "bfloat16", "bfloat16")

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


def _large(name: str, change: Callable[[dict[str, Any]], None], d: int, **fields: Any) -> Case:
    call = Call(f"{name} d{d}", 4, 300, 300, 4, 4, d, dtypes=BF16, blocks=None, **fields)
    return Case(call, change)


_PADDING = partial(padding, biases=(-1e10, -1e12, -2.3e38, MIN))
_SINKS = partial(sinks, values=((1e10, 1e10), (-1e10, 0.5), (1e5, -1e30), (0.1, 1.0)))
_INPUTS, _SCALE = partial(align_keys, size=1e5), partial(align_keys, size=1.0)
BIASED = [_large("bias", _PADDING, d, bias=(4, 1)) for d in (16, 64, 96, 128, 256)]
PLAIN = [_large("inputs", _INPUTS, d) for d in (64, 128, 256)]
PLAIN += [_large("scale", _SCALE, d, scale=1e10) for d in (64, 128, 256)]
PLAIN += [_large("inputs causal", _INPUTS, d, mask={"causal": True}) for d in (64, 128, 256)]
PLAIN += [_large("sinks", _SINKS, 128, sinks=(4, 2))]
# head dims of the kernels for every GPU
NARROW = [_large("inputs", _INPUTS, d) for d in (16, 96)]
NARROW += [_large("sinks", _SINKS, 16, sinks=(4, 2))]
AT_SIZE = {str(case): case for case in (*BIASED, *PLAIN, *NARROW)}


def wandering_maxima(unit: float, blocks: int, rows: int = 64, block: int = 16) -> np.ndarray:
    """Returns float32 ``[rows, blocks * block]`` whose maxima rise and fall from block to block.

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
    """Returns the size of the summands of each result."""
    call = case.call
    q, k, v, do = (as_float64(x[n]) for n in ("q", "k", "v", "do"))
    sizes = {n: float(np.abs(a).max()) for n, a in (("q", q), ("k", k), ("v", v), ("do", do))}
    v = np.repeat(v, call.h // call.hk, axis=2)
    dx = 2 * float(np.abs(np.einsum("bqhc,bkhc->bhqk", do, v)).max()) + np.abs(x["dlse"]).max()
    scale = abs(call.d**-0.5 if call.scale is None else call.scale)
    sizes |= {"o": sizes["v"], "lse": 1.0, "dv": sizes["do"], "dbias": dx}
    return sizes | {"dq": scale * dx * sizes["k"], "dk": scale * dx * sizes["q"], "dsinks": dx}


def _compared(case: Case, function: Any) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """Returns the arrays of a case, and (result, what the oracle has) by name."""
    call = case.call
    x = arrays(call)
    case.change(x)
    o, lse, grads = run(function, call, x)
    rounded = replace(oracle_case(call, x), logits=np.float32)
    good, grad = oracle.attention(rounded), oracle.gradients(rounded, x["do"], x["dlse"])
    results = {"o": (o, good.o), "lse": (lse, good.lse)}
    return x, results | {f"d{n}": (g, getattr(grad, f"d{n}")) for n, g in grads.items()}


def check(case: Case, function: Any) -> None:
    """Compares ``function`` (arguments as flash_attention's) with the oracle, by largest errors."""
    call = case.call
    x, results = _compared(case, function)
    sizes = natural(case, x)
    narrow = call.dtypes[0] != "float32"
    # rounding of logits that are neither small nor lost: with the float16 bias
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


def check_at_size(case: Case, function: Any) -> None:
    """Compares ``function`` with the oracle, by RMS errors of each batch row."""
    x, results = _compared(case, function)
    call = case.call
    scale = call.d**-0.5 if call.scale is None else call.scale
    slope = scale * np.sqrt(np.mean(as_float64(x["k"]) ** 2)) * call.d**0.5
    # what an entry of a gradient is made of: below that, differences are rounding
    sizes = {"dq": slope, "dk": slope, "dsinks": (call.b * call.q) ** 0.5}
    for name, (actual, want) in results.items():
        a = as_float64(actual)
        axes = () if name == "dsinks" else tuple(range(1, a.ndim))
        error, size = (np.sqrt(np.mean(y**2, axes)) for y in (a - want, as_float64(want)))
        ratio = np.where(error == 0.0, 0.0, error / (size + sizes.get(name, 0.0)))
        print(f"{case} {name}: {[f'{r:.1e}' for r in ratio.ravel()]}")
        assert (ratio <= BOUND["bfloat16"]).all(), (name, ratio)
