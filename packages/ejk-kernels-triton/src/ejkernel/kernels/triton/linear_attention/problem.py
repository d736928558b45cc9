"""The static properties of a call of linear attention, hashable: they key programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ejkernel.types.problems.recurrence import RecurrentProblem

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MAX_DIM = 256


@dataclass(frozen=True)
class Problem(RecurrentProblem):
    """Static properties of ``batch`` calls: sizes, dtypes and gates.

    Attributes:
        scalar: whether the state decays by one value a row and head, and by nothing else.
        key_parts, value_parts: number of bfloat16 values that hold a decay per channel of keys, of
            values; 0 = there is none.
        slopes: log decays of the heads, where they are constants of the operation.
        constant: whether the decay is a constant of every head.
    """

    scalar: bool
    key_parts: int = 0
    value_parts: int = 0
    slopes: tuple[float, ...] = ()
    constant: bool = False

    @property
    def steady(self) -> bool:
        """True where loops take the decay as a constant, the same in every chunk.

        Loops in float32 have no registers left for that.
        """
        return self.scalar and self.constant and self.compute_dtype == "bfloat16"


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    q, g, slopes = a["query"], a.get("g"), ()
    if "layer_idx" in a:
        step = -(8 / q.shape[2]) * (1 - a["layer_idx"] / a["num_layers"]) if q.shape[2] else 0.0
        slopes = tuple(step * head for head in range(q.shape[2]))
    gates = [x for x in (g, a.get("gk"), a.get("g_gamma")) if x is not None]
    channels, ahead = ([x for x in gates if (x.ndim == 4) == per] for per in (True, False))
    values = [a["gv"]] if a.get("gv") is not None else []
    # a decay per head is added to the decays of channels
    if channels:
        channels += ahead
    elif values:
        values += ahead
    return Problem.from_call(
        a,
        scalar=bool(ahead or slopes) and not (channels or values),
        constant=all(x.ndim == 1 for x in ahead),
        key_parts=_count_parts(channels),
        value_parts=_count_parts(values),
        slopes=slopes,
        unsupported=_unsupported_reason(a),
    )


def _unsupported_reason(a: Mapping[str, Any]) -> str:
    """Returns why no kernel here takes the call, or ""."""
    reason = ""
    for name in ("query", "key", "value", "g", "g_gamma", "gk", "gv", "initial_state"):
        x = a.get(name)
        if x is not None and jnp.dtype(x.dtype).name not in BYTES:
            dtype = jnp.dtype(x.dtype).name
            reason = f"{name}: {dtype} is not supported, only {', '.join(BYTES)}"
    for name in ("query", "value"):
        if a[name].shape[3] > MAX_DIM:
            reason = f"{name}: head dim {a[name].shape[3]} is more than {MAX_DIM}"
    return reason


def _count_parts(gates: list[Any]) -> int:
    """Returns the bfloat16 values that hold the sum of ``gates``."""
    if len(gates) == 1:
        return {"bfloat16": 1, "float16": 2}.get(jnp.dtype(gates[0].dtype).name, 3)
    return 3 if gates else 0
