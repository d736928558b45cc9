"""Softmax attention in float64 numpy, straight from the formulas, with analytic gradients.

    x = scale * q k^T + bias;  x = cap * tanh(x / cap)
    lse = log(sum over visible keys of exp(x) + sum over sinks of exp(sink))
    p = exp(x - lse) where visible;  o = drop(p) v

Arrays are ``[batch, length, heads, dim]``; everything here is [batch, heads, q, k] in memory, one
expression per line above. ``plain=True`` does the same in the working dtype of the inputs, for
derived tolerances to compare with. It is the same on every machine: terms are added in a few fixed
orders, and each result is from the order whose error is largest, because the error of a single
order may be small by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

M32 = 0xFFFFFFFF


# -- visibility ---------------------------------------------------------------------------------


def _sequence_of(cu: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequence number (-1 = padding) and position inside it of every packed row."""
    ids, positions = np.full(length, -1), np.zeros(length, np.int64)
    for m in range(len(cu) - 1):
        for t in range(int(cu[m]), min(int(cu[m + 1]), length)):
            ids[t], positions[t] = m, t - int(cu[m])
    return ids, positions


def visible(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    chunk_size: int | None = None,
    attention_mask: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    also: Any = None,
) -> np.ndarray:
    """bool ``[batch, heads or 1, q_len, kv_len]``: the AND of every constraint given."""
    i = np.broadcast_to(np.arange(q_len) if q_positions is None else q_positions, (batch, q_len))
    j = np.broadcast_to(
        np.arange(kv_len) if kv_positions is None else kv_positions, (batch, kv_len)
    )
    see = np.ones((batch, 1, q_len, kv_len), bool)
    if cum_seqlens_q is not None:
        q_ids, i = _sequence_of(np.asarray(cum_seqlens_q), q_len)
        cu_k = cum_seqlens_q if cum_seqlens_k is None else cum_seqlens_k
        kv_ids, j = _sequence_of(np.asarray(cu_k), kv_len)
        i, j = i[None], j[None]
        see = see & ((q_ids[:, None] == kv_ids[None]) & (q_ids[:, None] >= 0))
    i, j = i[:, None, :, None].astype(np.int64), j[:, None, None, :].astype(np.int64)
    centre = i + causal_offset
    if causal:
        see = see & (j <= centre)
    if sliding_window is not None:
        both = isinstance(sliding_window, tuple)
        left, right = sliding_window if both else (sliding_window, sliding_window)
        see = see & (centre - left <= j) & (j <= centre + right)
    if chunk_size is not None:
        see = see & (centre // chunk_size == j // chunk_size)
    if q_segment_ids is not None:
        a = np.asarray(q_segment_ids)[:, None, :, None]
        b = np.asarray(q_segment_ids if kv_segment_ids is None else kv_segment_ids)[:, None, None]
        see = see & (a == b) & (a >= 0)
    if attention_mask is not None:
        m = np.asarray(attention_mask) != 0
        m = {2: lambda: m[:, None, None], 3: lambda: m[:, None], 4: lambda: m}[m.ndim]()
        see = see & m
    return see if also is None else see & also


# -- dropout ------------------------------------------------------------------------------------


def _fmix(x: Any, s: Any = 0) -> Any:
    x = (x ^ (x >> 16)) * 0x85EBCA6B & M32
    x = x ^ s
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & M32
    return x ^ (x >> 16)


def hash_word(seed: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """The 32-bit word that decides one probability, on Python integers or arrays of 64 bits."""
    p1, p2, p3, p4, p5 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1
    a = _fmix(seed + p1 & M32)
    a = _fmix(a + b * p2 & M32)
    a = _fmix(a + h * p3 & M32)
    r = _fmix(a + i * p4 & M32)
    return _fmix(r + j * p5 & M32, _fmix(r ^ p1))


def dropout_factor(prob: float, seed: int, shape: tuple[int, int, int, int]) -> np.ndarray:
    """float64 ``[batch, heads, q, k]``: 0 for dropped probabilities, 1 / (1 - prob) for kept."""
    word = hash_word(seed & M32, *np.ix_(*(np.arange(n, dtype=np.uint64) for n in shape)))
    return ((word >> 8) >= round(prob * 2**24)) / (1.0 - prob)


# -- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call: the arrays as given to the operation, visibility and dropout factor worked out.

    bias ``[#b, #h, q, k]``, sinks ``[h, n]`` or ``[n]``, see bool ``[#b, #h, q, k]`` or None,
    drop ``[b, h, q, k]`` or None. ``logits``: the dtype that scaled scores plus bias are rounded
    to, where that rounding is part of the answer (logits too large for it to be small).
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    sinks: Any = None
    see: Any = None
    scale: float | None = None
    cap: float | None = None
    drop: Any = None
    logits: Any = None
    # intermediate arrays of several results, by name and order of addition
    parts: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, make: Callable[[Case, _Arithmetic], Any], ar: _Arithmetic) -> Any:
        key = make, ar.order
        if key not in self.parts:
            self.parts[key] = make(self, ar)
        return self.parts[key]


@dataclass(frozen=True)
class Result:
    """o ``[b, q, h, dv]``, lse ``[b, q, h]``, weights after dropout ``[b, h, q, k]``."""

    o: np.ndarray
    lse: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Gradients:
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None = None
    dsinks: np.ndarray | None = None


ORDERS = 4
IN_CACHE = 2**15  # elements


def summed_in_order(a: np.ndarray, b: np.ndarray, order: int) -> np.ndarray:
    """``a @ b``, its terms rounded and added one by one in the ``order``-th of a few fixed orders.

    A matmul of numpy takes an order that depends on the machine; elementwise arithmetic is the same
    everywhere.
    """
    terms = np.arange(a.shape[-1])
    terms = np.random.default_rng(order).permutation(terms) if order else terms
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for part, left, right in _parts(total, a, b):
        product = np.empty_like(part)
        for j in terms:
            np.multiply(left[..., :, j, None], right[..., None, j, :], out=product)
            part += product
    return total


def _parts(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields pieces of a matmul's result that fit into a processor's cache, with their operands."""
    if total.size <= IN_CACHE:
        yield total, a, b
        return
    rows = max(1, IN_CACHE // total.shape[-1])
    for leading in np.ndindex(total.shape[:-2]):
        for first in range(0, total.shape[-2], rows):
            block = slice(first, first + rows)
            yield total[leading][block], a[leading][block], b[leading]


class _Arithmetic:
    """float64 throughout (the reference), or with an ``order`` of addition the working dtype:
    accumulators and softmax in ``wide``, operands of matmuls rounded to ``narrow``."""

    def __init__(self, case: Case, order: int | None = None) -> None:
        self.order = order
        self.wide = self.narrow = np.dtype(np.float64)
        if order is not None:
            with jax.numpy_dtype_promotion("standard"):
                self.narrow = np.dtype(jnp.result_type(case.q, case.k, case.v))
                self.wide = np.dtype(jnp.promote_types(self.narrow, np.float32))

    def heads_first(self, x: Any, heads: int) -> np.ndarray:
        """``[b, n, hk, c]`` -> ``[b, heads, n, c]``: query head i reads kv head i // group."""
        x = np.asarray(x).astype(self.wide).transpose(0, 2, 1, 3)
        return np.repeat(x, heads // x.shape[1], axis=1)

    def array(self, x: Any) -> np.ndarray:
        return np.asarray(x).astype(self.wide)

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = (x.astype(self.narrow).astype(self.wide) for x in (a, b))
        return np.matmul(a, b) if self.order is None else summed_in_order(a, b, self.order)

    def stored(self, x: np.ndarray, like: Any) -> np.ndarray:
        """``x`` in the dtype of the input ``like``, as a kernel returns it."""
        return x if self.order is None else x.astype(np.asarray(like).dtype)

    def rounded(self, function: Any, x: np.ndarray) -> np.ndarray:
        """``function`` of numpy, rounded once: its float32 forms differ between machines."""
        return function(x.astype(np.float64)).astype(self.wide)


def _scale(case: Case) -> float:
    return case.q.shape[-1] ** -0.5 if case.scale is None else case.scale


def _t(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def _logits(case: Case, ar: _Arithmetic) -> tuple[np.ndarray, np.ndarray]:
    """x, -inf where hidden, and the slope of the cap."""
    h = case.q.shape[2]
    x = ar.dot(ar.heads_first(case.q, h), _t(ar.heads_first(case.k, h)))
    x = x * ar.wide.type(_scale(case))
    if case.bias is not None:
        x = x + ar.array(case.bias)
    if case.logits is not None:
        x = x.astype(case.logits).astype(ar.wide)
    slope = np.ones_like(x)
    if case.cap is not None:
        cap = ar.wide.type(case.cap)
        t = ar.rounded(np.tanh, x / cap)
        x, slope = cap * t, 1 - t**2
    see = np.ones(x.shape, bool) if case.see is None else np.broadcast_to(case.see, x.shape)
    return np.where(see, x, ar.wide.type(-np.inf)), slope


def _probabilities(case: Case, ar: _Arithmetic):
    """p, the sinks' p and lse."""
    h = case.q.shape[2]
    x, _ = case.once(_logits, ar)
    sinks = ar.array(np.zeros((h, 0)) if case.sinks is None else case.sinks)
    sinks = np.broadcast_to(sinks, (h, sinks.shape[-1]))
    top = np.max(x, axis=-1, initial=-np.inf)
    dead = np.isneginf(top)
    top = np.maximum(top, np.max(sinks, axis=-1, initial=-np.inf)[None, :, None])
    top = np.where(np.isneginf(top), ar.wide.type(0), top)
    e = ar.rounded(np.exp, x - top[..., None])
    e_sink = ar.rounded(np.exp, sinks[None, :, None] - top[..., None])
    total = np.where(dead, ar.wide.type(1), e.sum(-1) + e_sink.sum(-1))
    p = np.where(dead[..., None], 0, e / total[..., None]).astype(ar.wide)
    p_sink = np.where(dead[..., None], 0, e_sink / total[..., None]).astype(ar.wide)
    lse = np.where(dead, -np.inf, top + ar.rounded(np.log, total)).astype(ar.wide)
    return p, p_sink, lse


def _recomputed(case: Case, ar: _Arithmetic, p: np.ndarray, lse: np.ndarray):
    """p and the slope of the cap as a backward pass has them: in the working dtype exp(x - lse),
    with the rounded lse and x summed in another order."""
    if ar.order is None:
        return p, case.once(_logits, ar)[1]
    x, slope = case.once(_logits, _Arithmetic(case, (ar.order + 1) % ORDERS))
    end = np.where(np.isneginf(lse), np.inf, lse).astype(ar.wide)
    return ar.rounded(np.exp, x - end[..., None]), slope


def _plain(formula: Callable[[_Arithmetic], Any], case: Case) -> Any:
    """Returns ``formula`` in the working dtype; each array is from the order that errs most."""
    exact = formula(_Arithmetic(case))
    results = [formula(_Arithmetic(case, order)) for order in range(ORDERS)]

    def worst(name: str) -> Any:
        good = getattr(exact, name)
        if good is None:
            return None

        def error(x: np.ndarray) -> float:
            return float(
                np.abs(np.where(x == good, 0.0, x.astype(np.float64) - good)).max(initial=0.0)
            )

        with np.errstate(invalid="ignore"):  # -inf minus -inf
            return max((getattr(r, name) for r in results), key=error)

    return replace(exact, **{f.name: worst(f.name) for f in fields(exact)})


def attention(case: Case, *, plain: bool = False) -> Result:
    """The formulas in float64, or with ``plain`` in the working dtype of the inputs."""
    return _plain(partial(_attention, case), case) if plain else _attention(case, _Arithmetic(case))


def _attention(case: Case, ar: _Arithmetic) -> Result:
    p, _, lse = case.once(_probabilities, ar)
    w = p if case.drop is None else p * ar.array(case.drop)
    o = ar.dot(w, ar.heads_first(case.v, case.q.shape[2])).transpose(0, 2, 1, 3)
    return Result(ar.stored(o, case.q), lse.transpose(0, 2, 1), w)


def gradients(case: Case, do: Any, dlse: Any = None, *, plain: bool = False) -> Gradients:
    """Derivatives of sum(do * o) + sum(dlse * lse), in float64 or with ``plain`` as above.

        dv = w^T do;  dp = drop * (do v^T);  dx = p * (dp - sum_j p dp + dlse) * d cap / dx
        dq = scale * dx k;  dk = scale * dx^T q;  dbias = dx;  dsink = p_sink * (dlse - sum_j p dp)

    with dlse of rows that see no key ignored, and broadcast inputs summed over their axes.
    """
    formula = partial(_gradients, case, do, dlse)
    return _plain(formula, case) if plain else formula(_Arithmetic(case))


def _gradients(case: Case, do: Any, dlse: Any, ar: _Arithmetic) -> Gradients:
    p, p_sink, lse = case.once(_probabilities, ar)
    h = case.q.shape[2]
    q, k, v, g = (ar.heads_first(x, h) for x in (case.q, case.k, case.v, do))
    drop = ar.wide.type(1) if case.drop is None else ar.array(case.drop)
    dp = drop * ar.dot(g, _t(v))
    row = -(p * dp).sum(-1)
    if dlse is not None:
        row = row + np.where(np.isneginf(lse), 0, ar.array(dlse).transpose(0, 2, 1))
    p, slope = _recomputed(case, ar, p, lse)
    dx = p * (dp + row[..., None]) * slope
    scale = ar.wide.type(_scale(case))

    def per_kv_head(x: np.ndarray, like: Any) -> np.ndarray:
        b, _, n, c = x.shape
        x = x.reshape(b, like.shape[2], -1, n, c).sum(2)
        return ar.stored(x.transpose(0, 2, 1, 3), like)

    dbias = dsinks = None
    if case.bias is not None:
        axes = tuple(a for a in range(4) if case.bias.shape[a] == 1 and dx.shape[a] != 1)
        dbias = ar.stored(dx.sum(axes, keepdims=True) if axes else dx, case.bias)
    if case.sinks is not None:
        dsinks = (p_sink * row[..., None]).sum((0, 2))
        dsinks = ar.stored(dsinks.sum(0) if case.sinks.ndim == 1 else dsinks, case.sinks)
    return Gradients(
        ar.stored((scale * ar.dot(dx, k)).transpose(0, 2, 1, 3), case.q),
        per_kv_head(scale * ar.dot(_t(dx), q), case.k),
        per_kv_head(ar.dot(_t(p * drop), g), case.v),
        dbias,
        dsinks,
    )
