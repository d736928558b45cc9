"""Random inputs of small calls, and what a small call must give, for the tests of every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.oracles import linear, pooling
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


# ---- mean pooling ------------------------------------------------------------------------------


def check_pool(pool: Callable[..., Any], x: jax.Array, cu=None, mask=None, chunk=None) -> jax.Array:
    """Means and gradient of ``pool(x, cu, mask, chunk)`` against the oracle; cu and mask traced."""
    out, (dx,), dout = pulled(lambda x, *rest: pool(x, *rest, chunk), (x,), cu, mask)
    want, dwant = pooling.mean_pooling(x, cu, chunk_size=chunk, attention_mask=mask, dout=dout)
    assert out.dtype == dx.dtype == x.dtype
    check_close(out, want, name="out")
    check_close(dx, dwant, name="dx")
    return out
