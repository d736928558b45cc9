"""Calls of linear attention: random arguments, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.abstract import F32, AbstractCall, abstract_call
from ejktest.drawn import array, normal
from ejktest.oracles import linear
from ejktest.tolerance import check_close


def linear_arguments(
    kinds: Sequence[str],
    *,
    b: int,
    s: int,
    h: int,
    hk: int,
    dk: int,
    dv: int,
    states: int | None = None,
    seed: int = 0,
    size: float = 1.0,
    dtype: Any = np.float32,
) -> dict[str, jax.Array]:
    """Arguments by name: random q, k, v, the gates of ``kinds`` (log decays <= 0), a state."""
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> jax.Array:
        return array(rng.standard_normal(shape), dtype)

    def gate(*shape: int) -> jax.Array:
        return array(-size * np.abs(rng.standard_normal(shape)), dtype)

    args = dict(query=drawn(b, s, h, dk), key=drawn(b, s, hk, dk), value=drawn(b, s, hk, dv))
    shapes = dict(g4=(b, s, h, dk), g3=(b, s, h), g_gamma=(h,), gk=(b, s, h, dk), gv=(b, s, h, dv))
    for kind in kinds:
        args["g" if kind in ("g3", "g4") else kind] = gate(*shapes[kind])
    args["initial_state"] = drawn(states or b, h, dk, dv)
    return args


def linear_cotangents(args: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns cotangents of the output and of the last state."""
    rng = np.random.default_rng(1)
    q, v, table = args["query"], args["value"], args["initial_state"]
    do = array(rng.standard_normal((*q.shape[:3], v.shape[3])), q.dtype)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return do, array(rng.standard_normal(table.shape), wide)


def check_linear(
    args: Mapping[str, jax.Array],
    actual: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    *,
    state_dtype: Any = None,
    **options: Any,
) -> None:
    """Output, state and gradients, pulled through ``linear_cotangents``, against the oracle."""
    (o, state, grads), (do, dstate) = actual, linear_cotangents(args)
    want = linear.linear_attention(**args, do=do, dstate=dstate, **options)
    check_close(o, want.o, dtype=args["query"].dtype, name="o")
    check_close(state, want.state, dtype=state_dtype, name="state")
    for name, x in args.items():
        assert grads[name].dtype == x.dtype
        check_close(grads[name], want.grads[name], dtype=x.dtype, name=f"d{name}")


def cotangents(o: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns random cotangents of an output and of a state."""
    return normal(*o.shape, seed=1, dtype=o.dtype), normal(*state.shape, seed=2, dtype=state.dtype)


def check_recurrence(
    args: Mapping[str, jax.Array],
    actual: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    want: linear.Result,
    plain: linear.Result | None = None,
    *,
    state_dtype: Any = None,
) -> None:
    """Compares output, state and gradients with the oracle's.

    ``plain``: results of the reference dtype, as in ``check_close``.
    """
    o, state, grads = actual
    check_close(o, want.o, plain and plain.o, name="o")
    check_close(state, want.state, plain and plain.state, dtype=state_dtype, name="state")
    for name, x in args.items():
        assert grads[name].dtype == x.dtype
        expected = plain and plain.grads[name]
        check_close(grads[name], want.grads[name], expected, name=f"d{name}")


# ---- ahead of time -------------------------------------------------------------------------------


def _linear(operation: str, *gates: str, per_head: bool = True, **options: Any) -> AbstractCall:
    sizes = {"batch": 2, "seq": 8192, "heads": 16, "key_dim": 128}
    return abstract_call(
        operation, sizes, *gates, dtypes=dict.fromkeys(gates, F32), forms={"g": int(per_head)},
        trained=True, options=options,
    )  # fmt: skip


def _linear_step() -> AbstractCall:
    sizes = {"batch": 64, "seq": 1, "heads": 16, "key_dim": 128}
    dtypes, options = {"g": F32, "initial_state": F32}, {"return_state": True}
    return abstract_call(
        "recurrent_attention", sizes, *dtypes, dtypes=dtypes, forms={"g": 1}, options=options
    )


COMPILED = {
    "linear channels": _linear("gla_attention", "g", per_head=False),
    "linear heads": _linear("recurrent_attention", "g"),
    "linear constant": _linear("lightning_attention", layer_idx=3, num_layers=24),
    "linear values": _linear("recurrent_attention", "g", "gv"),
    "linear step": _linear_step(),
}
COMPILED_TPU = {
    "linear heads": COMPILED["linear heads"],
    "linear constant": COMPILED["linear constant"],
    "linear packed reverse": abstract_call(
        "recurrent_attention",
        {"batch": 1, "seq": 4096, "heads": 8, "kv_heads": 2, "key_dim": 64, "sequences": 32},
        "g", "cu_seqlens", dtypes={"g": F32}, forms={"g": 1}, trained=True,
        options={"reverse": True},
    ),
    "linear short d256": abstract_call(
        "gla_attention", {"batch": 4, "seq": 50, "heads": 4, "key_dim": 256, "kv_heads": 4},
        "g", forms={"g": 1}, dtype=F32, trained=True,
    ),
}  # fmt: skip
