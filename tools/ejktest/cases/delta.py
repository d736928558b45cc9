"""Calls of the gated delta rule: random arguments, the comparison with the oracle, what is compiled
ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejktest.abstract import BF16, F32, AbstractCall, abstract_call
from ejktest.cases.linear import check_recurrence, cotangents
from ejktest.drawn import array
from ejktest.oracles import delta


def delta_arguments(
    gate: str,
    *,
    b: int,
    s: int,
    h: int,
    hk: int,
    dk: int,
    dv: int,
    states: int | None = None,
    seed: int = 0,
    dtype: Any = np.float32,
) -> dict[str, jax.Array]:
    """Arguments by name: keys of length 1, beta between 0 and 1, log decays <= 0, a state.

    ``gate``: "none", which also leaves out beta, "head" or "channel".
    """
    rng = np.random.default_rng(seed)
    drawn = {
        "query": rng.standard_normal((b, s, hk, dk)),
        "key": rng.standard_normal((b, s, hk, dk)),
        "value": rng.standard_normal((b, s, h, dv)),
    }
    drawn["key"] /= np.linalg.norm(drawn["key"], axis=-1, keepdims=True)
    if gate != "none":
        size = (b, s, h, dk) if gate == "channel" else (b, s, h)
        drawn["g"] = -np.abs(rng.standard_normal(size)) / 4
        drawn["beta"] = rng.random((b, s, h))
    drawn["initial_state"] = rng.standard_normal((states or b, h, dk, dv))
    return {name: array(x, dtype) for name, x in drawn.items()}


def serving_batch(gate: str) -> tuple[dict[str, jax.Array], np.ndarray]:
    """Arguments and cumulative lengths of sequences with states: of one token, of none, of no whole
    number of chunks of up to 128, and rows of none. Some tokens forget everything (gates of -50),
    others nothing; keys of a sequence are equal, and beta is up to 2."""
    cu = np.array([0, 1, 2, 2, 141, 142, 148], np.int32)
    sizes = {"b": 1, "s": 150, "h": 2, "hk": 1, "dk": 8, "dv": 6, "states": len(cu) - 1}
    args = delta_arguments(gate, **sizes)
    t, owner = np.arange(150), np.searchsorted(cu, np.arange(150), side="right")
    key = np.array(args["key"])[:, np.where(owner == 4, cu[3], t)]
    g = np.array(args["g"])
    g[:, t % 11 == 3], g[:, t % 11 > 6] = -50.0, 0.0
    return args | {"key": array(key), "g": array(g), "beta": 2 * args["beta"]}, cu


def check_delta(
    args: Mapping[str, jax.Array],
    actual: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    *,
    state_dtype: Any = None,
    rounded_beta: bool = False,
    **options: Any,
) -> None:
    """Compares output, state and gradients for ``cotangents`` with the oracle's.

    ``rounded_beta``: as close as the result for a beta that is one float32 rounding larger. Where
    keys repeat and ``beta |k|^2`` is about 2, no float32 computation of ``beta k k^T`` is closer.
    """
    do, dstate = cotangents(*actual[:2])
    options |= {"do": do, "dstate": dstate}
    want = delta.gated_delta_rule(**args, **options)
    plain = None
    if rounded_beta:
        beta = np.asarray(args["beta"]).astype(np.float64) * (1 + 2.0**-23)
        plain = delta.gated_delta_rule(**{**args, "beta": beta}, **options)
    check_recurrence(args, actual, want, plain, state_dtype=state_dtype)


# ---- ahead of time -------------------------------------------------------------------------------


def _delta(
    *optional: str, dtype: str = BF16, channel_gates: bool = False, **sizes: int
) -> AbstractCall:
    """Training of Qwen3-Next's layer, or one with gates per key channel as Kimi Linear's."""
    sizes = {"batch": 1, "seq": 8192, "heads": 32, "kv_heads": 16, "key_dim": 128} | sizes
    return abstract_call(
        "gated_delta_rule", sizes, "g", "beta", *optional, dtype=dtype,
        dtypes={"g": F32, "initial_state": F32}, forms={"g": int(channel_gates)}, trained=True,
        options={"normalize_qk": True},
    )  # fmt: skip


def _delta_step() -> AbstractCall:
    sizes = {"batch": 64, "seq": 1, "heads": 32, "kv_heads": 16, "key_dim": 128}
    return abstract_call(
        "gated_delta_rule", sizes, "g", "beta", "initial_state",
        dtypes={"g": F32, "initial_state": F32},
        options={"return_state": True, "normalize_qk": True},
    )  # fmt: skip


COMPILED = {
    "delta": _delta(),
    "delta d64": _delta(key_dim=64, kv_heads=32),
    "delta packed": _delta("initial_state", "cu_seqlens", seq=65536, sequences=32, states=32),
    "delta float32": _delta(dtype=F32),
    "delta channels": _delta(kv_heads=32, channel_gates=True),
    "delta step": _delta_step(),
}

COMPILED_TPU = {
    "delta": COMPILED["delta"],
    "delta d64": COMPILED["delta d64"],
    "delta packed": COMPILED["delta packed"],
    "delta float32": COMPILED["delta float32"],
    "delta channels": COMPILED["delta channels"],
    "delta channels float32": _delta(kv_heads=32, channel_gates=True, dtype=F32),
    "delta channels d256 float32": _delta(
        heads=4, kv_heads=4, key_dim=256, channel_gates=True, dtype=F32
    ),
}
