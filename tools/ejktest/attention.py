"""Calls of softmax attention on dense arrays, drawn at random and compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types import MaskInfo
from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close


class Pattern(NamedTuple):
    """A random block mask: blocks of rows and keys, the share that is seen, (batch, heads)."""

    rows: int
    keys: int
    share: float
    lead: tuple[int, int]


@dataclass(frozen=True)
class Call:
    """Sizes, dtypes and options of one call.

    ``mask`` are keyword arguments that both the operation and ``oracle.visible`` know; ``segments``
    and ``dense`` add a random mask of documents and an array. ``bias`` is the (batch, heads) shape
    of the bias; ``dtypes`` are for q, k and v. ``blocks``: tiles of the config, None = no config.
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
    blocks: tuple[int, int] | None = (16, 32)
    amplitude: float = 1.0
    rms_limit: float | None = None
    precision: str | None = None
    segments: bool = False
    dense: bool = False
    pattern: Pattern | None = None

    def __str__(self) -> str:
        return self.name


def arrays(call: Call, seed: int = 0) -> dict[str, np.ndarray | None]:
    """Draws q, k, v, bias, sinks, do and dlse, and the random parts of the mask."""
    rng = np.random.default_rng(seed)
    dv = call.d if call.dv is None else call.dv

    def normal(dtype: str, *shape: int) -> np.ndarray:
        return (call.amplitude * rng.standard_normal(shape)).astype(jnp.dtype(dtype))

    dq, dk, dv_ = call.dtypes
    wide = "float64" if "float64" in call.dtypes else "float32"
    drawn = {
        "q": normal(dq, call.b, call.q, call.h, call.d),
        "k": normal(dk, call.b, call.k, call.hk, call.d),
        "v": normal(dv_, call.b, call.k, call.hk, dv),
        "bias": None if call.bias is None else normal(wide, *call.bias, call.q, call.k),
        "sinks": None if call.sinks is None else normal(wide, *call.sinks),
        "do": rng.standard_normal((call.b, call.q, call.h, dv)).astype(jnp.dtype(dq)),
        "dlse": rng.standard_normal((call.b, call.q, call.h)).astype(wide),
    }
    if call.segments:
        ids = _packed_ids(rng, call.b, max(call.q, call.k))
        drawn |= {"q_segment_ids": ids[:, : call.q], "kv_segment_ids": ids[:, : call.k]}
    if call.dense:
        drawn["attention_mask"] = rng.random((call.b, 1, call.q, call.k)) < 0.6
    if call.pattern is not None:
        p = call.pattern
        blocks = (*p.lead, -(-call.q // p.rows), -(-call.k // p.keys))
        drawn["block_mask"] = rng.random(blocks) < p.share
    return drawn


def _packed_ids(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Returns sorted ids of six documents with a tail of padding."""
    ends = np.sort(rng.integers(0, length, (batch, 6)), 1)
    ids = (np.arange(length)[None, :, None] >= ends[:, None]).sum(-1)
    return np.where(np.arange(length) >= length - length // 10, -1, ids).astype(np.int32)


def oracle_case(call: Call, x: dict[str, Any], seed: int = 0) -> oracle.Case:
    drawn = {n: x[n] for n in ("q_segment_ids", "kv_segment_ids", "attention_mask") if n in x}
    see = oracle.visible(call.b, call.q, call.k, **call.mask, **drawn)
    if call.pattern is not None:
        i, j = np.arange(call.q)[:, None], np.arange(call.k)
        see = see & x["block_mask"][:, :, i // call.pattern.rows, j // call.pattern.keys]
    drop = None
    if call.dropout:
        drop = oracle.dropout_factor(call.dropout, seed, (call.b, call.h, call.q, call.k))
    return oracle.Case(
        x["q"], x["k"], x["v"], x["bias"], x["sinks"], see, call.scale, call.cap, drop
    )


def options(call: Call, seed: int = 0) -> dict[str, Any]:
    """Returns keyword arguments of the operation."""
    arguments: dict[str, Any] = dict(call.mask)
    if call.dropout:
        arguments |= {"dropout_prob": call.dropout, "dropout_seed": seed}
    if call.precision is not None:
        arguments["precision"] = call.precision
    if call.pattern is not None:
        arguments |= {"q_block_size": call.pattern.rows, "kv_block_size": call.pattern.keys}
    if call.blocks is not None:
        tiles = dict(zip(("q_blocksize", "kv_blocksize"), call.blocks, strict=True))
        arguments["cfg"] = {"fwd_params": tiles, "bwd_params": tiles}
    return {**arguments, "logits_soft_cap": call.cap, "softmax_scale": call.scale}


def with_mask_info(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operation that takes ids, positions and chunks by name, outside a MaskInfo."""
    names = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "chunk_size")

    def call(*args: Any, **options: Any) -> Any:
        rules = {name: options.pop(name) for name in names if name in options}
        if "q_segment_ids" in rules:
            rules.setdefault("kv_segment_ids", rules["q_segment_ids"])
        if "q_positions" in rules:  # causal compares positions
            rules["causal"] = options.pop("causal", False)
        if rules:
            options["mask_info"] = MaskInfo(**rules)
        return function(*args, **options)

    return call


def with_gradients(
    function: Callable[..., Any], call: Call, seed: int = 0
) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    """Returns a function (differentiable arrays, other arrays) -> o, lse and the gradients by name.

    ``function`` takes arguments as flash_attention does, ids and positions by name.
    """

    def outputs(x: dict[str, Any], masks: dict[str, Any]) -> Any:
        return function(
            x["q"], x["k"], x["v"], bias=x.get("bias"), softmax_aux=x.get("sinks"),
            return_lse=True, **masks, **options(call, seed),
        )  # fmt: skip

    def output_and_gradients(x: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
        masks = {name: a for name, a in fixed.items() if name not in ("do", "dlse")}
        (o, lse), back = jax.vjp(lambda x: outputs(x, masks), x)
        return {"o": o, "lse": lse, **back((fixed["do"], fixed["dlse"]))[0]}

    return output_and_gradients


def split(x: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays that have gradients, and the others."""
    smooth = {n: x[n] for n in ("q", "k", "v", "bias", "sinks") if x[n] is not None}
    return smooth, {n: a for n, a in x.items() if n not in smooth and a is not None}


def run(function: Any, call: Call, x: dict[str, Any], seed: int = 0) -> tuple[Any, Any, dict]:
    """Returns (o, lse, gradients by name) of ``function``, in one compiled program."""
    grads = jax.jit(with_gradients(function, call, seed))(*split(x))  # of numpy: compiles no input
    return grads.pop("o"), grads.pop("lse"), grads


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
