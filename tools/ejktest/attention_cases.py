"""Random attention calls and the comparison with the oracle, shared by the attention tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close


@dataclass(frozen=True)
class Call:
    """Sizes, dtypes and options of one call.

    ``mask`` are keyword arguments that both the operation and ``oracle.visible`` know; ``bias``
    is the (batch, heads) shape of the bias; ``dtypes`` are those of q, k, v.
    """

    name: str
    b: int = 2
    q: int = 40
    k: int = 40
    h: int = 4
    hk: int = 4
    d: int = 32
    dv: int | None = None
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
    mask: dict[str, Any] = field(default_factory=dict)
    bias: tuple[int, int] | None = None
    sinks: tuple[int, ...] | None = None
    cap: float | None = None
    scale: float | None = None
    dropout: float = 0.0
    blocks: tuple[int, int] = (16, 32)
    amplitude: float = 1.0
    rms_limit: float | None = None

    def __str__(self) -> str:
        return self.name


def arrays(call: Call, seed: int = 0) -> dict[str, np.ndarray | None]:
    """q, k, v, bias, sinks, do, dlse."""
    rng = np.random.default_rng(seed)
    dv = call.d if call.dv is None else call.dv

    def normal(dtype: str, *shape: int) -> np.ndarray:
        return (call.amplitude * rng.standard_normal(shape)).astype(jnp.dtype(dtype))

    dq, dk, dv_ = call.dtypes
    wide = "float64" if "float64" in call.dtypes else "float32"
    return {
        "q": normal(dq, call.b, call.q, call.h, call.d),
        "k": normal(dk, call.b, call.k, call.hk, call.d),
        "v": normal(dv_, call.b, call.k, call.hk, dv),
        "bias": None if call.bias is None else normal(wide, *call.bias, call.q, call.k),
        "sinks": None if call.sinks is None else normal(wide, *call.sinks),
        "do": rng.standard_normal((call.b, call.q, call.h, dv)).astype(jnp.dtype(dq)),
        "dlse": rng.standard_normal((call.b, call.q, call.h)).astype(wide),
    }


def oracle_case(call: Call, x: dict[str, Any], seed: int = 0) -> oracle.Case:
    see = oracle.visible(call.b, call.q, call.k, **call.mask)
    drop = None
    if call.dropout:
        drop = oracle.dropout_factor(call.dropout, seed, (call.b, call.h, call.q, call.k))
    return oracle.Case(
        x["q"], x["k"], x["v"], x["bias"], x["sinks"], see, call.scale, call.cap, drop
    )


def options(call: Call, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the operation."""
    drop = {"dropout_prob": call.dropout, "dropout_seed": seed} if call.dropout else {}
    return {
        **call.mask,
        **drop,
        "logits_soft_cap": call.cap,
        "softmax_scale": call.scale,
        "cfg": {
            name: {"q_blocksize": call.blocks[0], "kv_blocksize": call.blocks[1]}
            for name in ("fwd_params", "bwd_params")
        },
    }


def run(function: Any, call: Call, x: dict[str, Any], seed: int = 0) -> tuple[Any, Any, dict]:
    """(o, lse, gradients by name) of ``function`` with return_lse, in one compiled program."""
    names = [n for n in ("q", "k", "v", "bias", "sinks") if x[n] is not None]
    given = {n: x[n] for n in names}  # of numpy: nothing is compiled to make an array

    def outputs(g: dict[str, Any]) -> Any:
        return function(
            g["q"],
            g["k"],
            g["v"],
            bias=g.get("bias"),
            softmax_aux=g.get("sinks"),
            return_lse=True,
            **options(call, seed),
        )

    @jax.jit
    def all_of(given: Any, do: Any, dlse: Any) -> Any:
        out, vjp = jax.vjp(outputs, given)
        return out, vjp((do, dlse))[0]

    (o, lse), grads = all_of(given, x["do"], x["dlse"])
    return o, lse, grads


def check(call: Call, x: dict[str, Any], o: Any, lse: Any, grads: dict, seed: int = 0) -> None:
    """Outputs and gradients against the float64 oracle and the plain computation."""
    case = oracle_case(call, x, seed)
    factor = 3.0 if call.cap is not None or call.dropout else 2.0
    key = min(call.dtypes, key=lambda t: jnp.finfo(t).bits + jnp.finfo(t).nmant)
    exact = key == "float64"  # then the oracle is no better than what it judges

    def hold(name: str, actual: Any, good: Any, plain: Any) -> None:
        plain = None if exact else getattr(plain, name)
        limits = {"factor": factor, "rms_limit": call.rms_limit, "dtype": key}
        check_close(actual, getattr(good, name), plain, name=name, **limits)

    good, plain = oracle.attention(case), oracle.attention(case, plain=True)
    hold("o", o, good, plain)
    hold("lse", lse, good, plain)
    good = oracle.gradients(case, x["do"], x["dlse"])
    plain = oracle.gradients(case, x["do"], x["dlse"], plain=True)
    for name, grad in grads.items():
        assert grad.dtype == x[name].dtype, name
        hold(f"d{name}", grad, good, plain)
