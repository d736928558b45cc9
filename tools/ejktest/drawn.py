"""Random inputs of small calls, and what a small call must give, for the tests of every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.oracles import convolution, delta, linear, pooling
from ejktest.tolerance import check_close


def array(x: Any, dtype: Any = None) -> jax.Array:
    """``jnp.asarray``, which compiles a program for every shape: this compiles none."""
    x = np.asarray(x)
    return jax.device_put(x if dtype is None else x.astype(jnp.dtype(dtype)))


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """Normal numbers, others for every shape."""
    return array(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


@partial(jax.jit, static_argnums=0)
def pulled(function: Callable[..., Any], wanted: tuple[Any, ...], *rest: Any) -> Any:
    """``(out, gradients of wanted, cotangent)`` of ``function(*wanted, *rest)``, all traced."""
    out, back = jax.vjp(lambda *wanted: function(*wanted, *rest), *wanted)
    cotangent = normal(*out.shape, seed=3, dtype=out.dtype)
    return out, back(cotangent), cotangent


def wild_tables(
    rng: np.random.Generator, lens: Sequence[int], page_size: int
) -> tuple[np.ndarray, int]:
    """Pages out of order, numbers that are none behind them; and how many pages: three unused."""
    counts = [-(-n // page_size) for n in lens]
    pages = sum(counts) + 3
    order = rng.permutation(pages)
    tables = np.full((len(lens), max(1, *counts)), -1, np.int32)
    start = 0
    for row, n in zip(tables, counts, strict=True):
        row[:n] = order[start : start + n]
        start += n
    tables[tables < 0] = rng.choice([-1, 2**30, 2**31 - 1, -(2**31), pages], (tables < 0).sum())
    return tables, pages


# ---- linear attention --------------------------------------------------------------------------


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
    """Those of the output and of the last state."""
    rng = np.random.default_rng(1)
    q, v, table = args["query"], args["value"], args["initial_state"]
    do = array(rng.standard_normal((*q.shape[:3], v.shape[3])), q.dtype)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return do, array(rng.standard_normal(table.shape), wide)


def check_linear(
    args: Mapping[str, jax.Array],
    found: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    *,
    state_dtype: Any = None,
    **options: Any,
) -> None:
    """Output, state and gradients, pulled through ``linear_cotangents``, against the oracle."""
    (o, state, grads), (do, dstate) = found, linear_cotangents(args)
    want = linear.linear_attention(**args, do=do, dstate=dstate, **options)
    check_close(o, want.o, dtype=args["query"].dtype, name="o")
    check_close(state, want.state, dtype=state_dtype, name="state")
    for name, x in args.items():
        assert grads[name].dtype == x.dtype
        check_close(grads[name], want.grads[name], dtype=x.dtype, name=f"d{name}")


# ---- delta rule, convolution -------------------------------------------------------------------


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


def cotangents(o: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Random gradients of an output and of a state."""
    return normal(*o.shape, seed=1, dtype=o.dtype), normal(*state.shape, seed=2, dtype=state.dtype)


def check_recurrence(
    args: Mapping[str, jax.Array],
    found: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    want: linear.Result,
    plain: linear.Result | None = None,
    *,
    state_dtype: Any = None,
) -> None:
    """Output, state and gradients against the oracle's.

    ``plain``: results whose errors say what may be expected, as in ``check_close``.
    """
    o, state, grads = found
    check_close(o, want.o, plain and plain.o, name="o")
    check_close(state, want.state, plain and plain.state, dtype=state_dtype, name="state")
    for name, x in args.items():
        assert grads[name].dtype == x.dtype
        expected = plain and plain.grads[name]
        check_close(grads[name], want.grads[name], expected, name=f"d{name}")


def check_delta(
    args: Mapping[str, jax.Array],
    found: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    *,
    state_dtype: Any = None,
    rounded_beta: bool = False,
    **options: Any,
) -> None:
    """Output, state and gradients, pulled through ``cotangents``, against the oracle.

    ``rounded_beta``: as close as the result for a beta that is one float32 rounding larger. Where
    keys repeat and ``beta |k|^2`` is about 2, no float32 computation of ``beta k k^T`` is closer.
    """
    do, dstate = cotangents(*found[:2])
    options |= {"do": do, "dstate": dstate}
    want = delta.gated_delta_rule(**args, **options)
    plain = None
    if rounded_beta:
        beta = np.asarray(args["beta"]).astype(np.float64) * (1 + 2.0**-23)
        plain = delta.gated_delta_rule(**{**args, "beta": beta}, **options)
    check_recurrence(args, found, want, plain, state_dtype=state_dtype)


def convolution_arguments(
    *, b: int, s: int, c: int, width: int, states: int | None = None, dtype: Any = np.float32
) -> dict[str, jax.Array]:
    """Returns normally distributed arguments by name."""
    shapes = {
        "x": (b, s, c),
        "weight": (c, width),
        "bias": (c,),
        "initial_state": (states or b, c, width - 1),
    }
    drawn = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return {name: array(x, dtype) for name, x in drawn.items()}


def check_convolution(
    args: Mapping[str, jax.Array],
    found: tuple[jax.Array, jax.Array, Mapping[str, jax.Array]],
    **options: Any,
) -> None:
    """Output, state and gradients, pulled through ``cotangents``, against the oracle."""
    do, dstate = cotangents(*found[:2])
    want = convolution.causal_conv1d(**args, do=do, dstate=dstate, **options)
    check_recurrence(args, found, want)


# ---- mean pooling ------------------------------------------------------------------------------


def check_pool(pool: Callable[..., Any], x: jax.Array, cu=None, mask=None, chunk=None) -> jax.Array:
    """Means and gradient of ``pool(x, cu, mask, chunk)`` against the oracle; cu and mask traced."""
    out, (dx,), dout = pulled(lambda x, *rest: pool(x, *rest, chunk), (x,), cu, mask)
    want, dwant = pooling.mean_pooling(x, cu, chunk_size=chunk, attention_mask=mask, dout=dout)
    assert out.dtype == dx.dtype == x.dtype
    check_close(out, want, name="out")
    check_close(dx, dwant, name="dx")
    return out
