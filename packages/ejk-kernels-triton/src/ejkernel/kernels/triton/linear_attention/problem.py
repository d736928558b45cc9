"""The static properties of a call of linear attention, hashable: they key programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MAX_DIM = 256


@dataclass(frozen=True)
class Problem:
    """Static properties of ``batch`` calls: sizes, dtypes and gates.

    Attributes:
        rows: of every batch row, packed sequences together.
        heads, kv_heads, dim, value_dim: sizes.
        sequences: packed in a batch row; 0 = the rows are one sequence.
        scale: factor of the query.
        reverse: time runs from the last row to the first.
        scalar: whether the state decays by one value a row and head, and by nothing else.
        key_parts, value_parts: number of bfloat16 values that hold a decay per channel of keys, of
            values; 0 = there is none.
        dtype: promoted dtype of q, k and v; ``out``: of o; ``narrowest``: of q, k and v.
        slopes: log decays of the heads, where they are constants of the operation.
        constant: whether the decay is a constant of every head.
        unsupported: the argument that no kernel here takes, or "".
    """

    batch: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    sequences: int
    scale: float
    reverse: bool
    scalar: bool
    dtype: str
    out: str
    narrowest: str
    key_parts: int = 0
    value_parts: int = 0
    slopes: tuple[float, ...] = ()
    constant: bool = False
    unsupported: str = ""

    @property
    def states(self) -> int:
        """Initial and final states of a batch row."""
        return max(self.sequences, 1)

    @property
    def steady(self) -> bool:
        """True where loops take the decay as a constant, the same in every chunk.

        Loops in float32 have no registers left for that.
        """
        return self.scalar and self.constant and self.operand == "bfloat16"

    @property
    def operand(self) -> str:
        """Dtype of the operands of a matmul.

        A state, and scores without a softmax, leave the range of float16; TF32 has all of its
        digits.
        """
        return "bfloat16" if self.dtype == "bfloat16" else "float32"

    def folded(self, size: int) -> Problem:
        """Returns the problem of ``size`` times as many batch rows."""
        return replace(self, batch=size * self.batch)


def problem_of(a: Mapping[str, Any]) -> Problem:
    """Returns the static properties of a call whose arguments are canonical."""
    q, k, v, cu = a["query"], a["key"], a["value"], a["cu_seqlens"]
    g, constant, unsupported = a.get("g"), (), ""
    if "layer_idx" in a:
        step = -(8 / q.shape[2]) * (1 - a["layer_idx"] / a["num_layers"]) if q.shape[2] else 0.0
        constant = tuple(step * head for head in range(q.shape[2]))
    given = [x for x in (g, a.get("gk"), a.get("g_gamma")) if x is not None]
    channels, ahead = ([x for x in given if (x.ndim == 4) == per] for per in (True, False))
    values = [a["gv"]] if a.get("gv") is not None else []
    # one number a head is added to the decays of channels
    if channels:
        channels += ahead
    elif values:
        values += ahead
    dtypes = [jnp.dtype(x.dtype).name for x in (q, k, v)]
    for name in ("query", "key", "value", "g", "g_gamma", "gk", "gv", "initial_state"):
        x = a.get(name)
        if x is not None and jnp.dtype(x.dtype).name not in BYTES:
            dtype = jnp.dtype(x.dtype).name
            unsupported = f"{name}: {dtype} is not supported, only {', '.join(BYTES)}"
    for name, n in (("query", q.shape[3]), ("value", v.shape[3])):
        if n > MAX_DIM:
            unsupported = f"{name}: head dim {n} is more than {MAX_DIM}"
    return Problem(
        batch=q.shape[0],
        rows=q.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        sequences=0 if cu is None else cu.shape[0] - 1,
        scale=a["softmax_scale"],
        reverse=a["reverse"],
        scalar=bool(ahead or constant) and not (channels or values),
        constant=all(x.ndim == 1 for x in ahead),
        key_parts=_parts(channels),
        value_parts=_parts(values),
        dtype=dtypes[0]
        if len(set(dtypes)) == 1
        else result_dtype(*(x.dtype for x in (q, k, v))).name,
        out=dtypes[0],
        narrowest=min(dtypes, key=lambda name: BYTES.get(name, 8)),
        slopes=constant,
        unsupported=unsupported,
    )


def _parts(gates: list[Any]) -> int:
    """Returns the bfloat16 values that hold the sum of ``gates``."""
    if len(gates) == 1:
        return {"bfloat16": 1, "float16": 2}.get(jnp.dtype(gates[0].dtype).name, 3)
    return 3 if gates else 0
