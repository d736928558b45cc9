"""Known score_mods and mask_mods, and the same calls in the words of the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close

Captured = Mapping[str, Any]
B, H, Q, K = 2, 4, 40, 50
QI, KJ = np.arange(Q)[:, None], np.arange(K)[None]
RADIUS, WIDTH, WINDOW = 8, 8, 9


@dataclass(frozen=True)
class Form:
    """One call with mods.

    Attributes:
        captured: the shapes of the arrays that the functions close over, drawn at random; or the
            arrays themselves, of integers.
        score, mask: the functions, made of the captured arrays.
        bias, see, cap: the same for the oracle, ``[#b, #h, q, k]``.
        gradients: of captured floats, from the gradient of the bias ``[b, h, q, k]``.
        options: other arguments of the operation.
    """

    name: str
    captured: Mapping[str, Any] = field(default_factory=dict)
    score: Callable[[Captured], Any] | None = None
    mask: Callable[[Captured], Any] | None = None
    bias: Callable[[Captured], np.ndarray] | None = None
    see: Callable[[Captured], np.ndarray] | None = None
    cap: float | None = None
    gradients: Callable[[np.ndarray], Mapping[str, np.ndarray]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _relative_gradient(dbias: np.ndarray) -> dict[str, np.ndarray]:
    table = np.zeros((H, 2 * RADIUS + 1))
    for h in range(H):
        np.add.at(table[h], np.clip(KJ - QI, -RADIUS, RADIUS) + RADIUS, dbias[:, h].sum(0))
    return {"table": table}


def _neighbours(a: Any, b: Any, xp: Any = jnp) -> Any:
    rows = xp.abs(a // WIDTH - b // WIDTH)
    return (rows <= 2) & (xp.abs(a % WIDTH - b % WIDTH) <= 2)


DOCUMENTS = np.stack([np.repeat([0, 1, 2], [11, 20, 19]), np.repeat([4, 3], [37, 13])])
PREFIX = np.array([7, 45])
CAUSAL = (KJ <= QI)[None, None]
FORMS = [
    Form(
        "alibi",
        {"slopes": (H,)},
        score=lambda c: lambda s, b, h, q, k: s + c["slopes"][h] * (k - q),
        bias=lambda c: c["slopes"][None, :, None, None] * (KJ - QI),
        gradients=lambda d: {"slopes": (d * (KJ - QI)).sum((0, 2, 3))},
        see=lambda c: CAUSAL,
        options={"causal": True},
    ),
    Form(
        "relative_bias",
        {"table": (H, 2 * RADIUS + 1)},
        score=lambda c: (
            lambda s, b, h, q, k: s + c["table"][h, jnp.clip(k - q, -RADIUS, RADIUS) + RADIUS]
        ),
        bias=lambda c: c["table"][:, np.clip(KJ - QI, -RADIUS, RADIUS) + RADIUS][None],
        gradients=_relative_gradient,
    ),
    Form(
        "document_window",
        {"ids": DOCUMENTS.astype(np.int32)},
        mask=lambda c: (
            lambda b, h, q, k: (c["ids"][b, q] == c["ids"][b, k]) & (q - k <= WINDOW) & (k <= q)
        ),
        see=lambda c: (
            CAUSAL
            & (QI - KJ <= WINDOW)
            & (DOCUMENTS[:, None, :Q, None] == DOCUMENTS[:, None, None])
        ),
    ),
    Form(
        "prefix_lm",
        {"prefix": PREFIX.astype(np.int32)},
        mask=lambda c: lambda b, h, q, k: (k <= q) | (k < c["prefix"][b]),
        see=lambda c: CAUSAL | (PREFIX[:, None, None, None] > KJ),
    ),
    Form(
        "soft_cap",
        score=lambda c: lambda s, b, h, q, k: 2.0 * jnp.tanh(s / 2.0),
        cap=2.0,
    ),
    # the function is NaN where no key is visible
    Form(
        "log_distance_causal",
        score=lambda c: lambda s, b, h, q, k: s - 0.25 * jnp.log(1.0 + q - k),
        mask=lambda c: lambda b, h, q, k: k <= q,
        bias=lambda c: -0.25 * np.log(1.0 + np.maximum(QI - KJ, 0))[None, None],
        see=lambda c: CAUSAL,
    ),
    Form(
        "neighbourhood",
        mask=lambda c: lambda b, h, q, k: _neighbours(q, k),
        see=lambda c: _neighbours(QI, KJ, np)[None, None],
    ),
    # rows that see nothing, a score of -inf, heads that differ, next to a cap by its argument
    Form(
        "dead_rows",
        score=lambda c: lambda s, b, h, q, k: jnp.where((k + h) % 3 == 0, -jnp.inf, s),
        mask=lambda c: lambda b, h, q, k: (q > 20) | (h == 1) & (k < 2 * q),
        see=lambda c: (
            ((KJ + np.arange(H)[:, None, None]) % 3 != 0)
            & ((QI > 20) | ((np.arange(H)[:, None, None] == 1) & (2 * QI > KJ)))
        )[None],
    ),
]


def arrays(form: Form, dtype: Any = np.float32, dim: int = 16, kv_heads: int = 2) -> dict[str, Any]:
    """Draws q, k, v, do, dlse and the captured arrays."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    drawn = {
        "q": normal(B, Q, H, dim),
        "k": normal(B, K, kv_heads, dim),
        "v": normal(B, K, kv_heads, dim),
        "do": normal(B, Q, H, dim),
        "dlse": rng.standard_normal((B, Q, H)).astype(np.float32),
    }
    captured = {
        name: x if isinstance(x, np.ndarray) else rng.standard_normal(x).astype(np.float32)
        for name, x in form.captured.items()
    }
    return drawn | {"captured": captured}


def run_form(function: Callable[..., Any], form: Form, x: Mapping[str, Any], **options: Any) -> Any:
    """Returns o, lse and the gradients by name, of captured floats too."""
    floats = {n: jnp.asarray(a) for n, a in x["captured"].items() if a.dtype.kind == "f"}
    others = {n: jnp.asarray(a) for n, a in x["captured"].items() if n not in floats}

    def call(q: Any, k: Any, v: Any, floats: Any) -> Any:
        made = floats | others
        mods = {
            "score_mod": None if form.score is None else form.score(made),
            "mask_mod": None if form.mask is None else form.mask(made),
        }
        return function(q, k, v, return_lse=True, **mods, **form.options, **options)

    def both(q: Any, k: Any, v: Any, floats: Any, do: Any, dlse: Any) -> Any:
        outputs, pull = jax.vjp(call, q, k, v, floats)
        return outputs, pull((do, dlse))

    inputs = (jnp.asarray(x[name]) for name in ("q", "k", "v"))
    (o, lse), (dq, dk, dv, dcaptured) = jax.jit(both)(
        *inputs, floats, jnp.asarray(x["do"]), jnp.asarray(x["dlse"])
    )
    return o, lse, {"dq": dq, "dk": dk, "dv": dv, **dcaptured}


def check(form: Form, x: Mapping[str, Any], o: Any, lse: Any, gradients: Any) -> None:
    """Compares with the oracle's results."""
    captured = {name: a.astype(np.float64) for name, a in x["captured"].items()}
    bias = None if form.bias is None else form.bias(captured)
    wide = np.zeros((B, H, Q, K)) if bias is None else np.broadcast_to(bias, (B, H, Q, K))
    see = None if form.see is None else form.see(captured)
    case = oracle.Case(x["q"], x["k"], x["v"], bias=wide.astype(np.float32), see=see, cap=form.cap)
    exact, plain = (oracle.attention(case, plain=flag) for flag in (False, True))
    dlse = np.where(np.isneginf(exact.lse), 0.0, x["dlse"])
    good, usual = (oracle.gradients(case, x["do"], dlse, plain=flag) for flag in (False, True))
    options = {"dtype": x["q"].dtype, "factor": 3.0 if form.cap else 2.0}
    check_close(o, exact.o, plain.o, name="o", **options)
    check_close(lse, exact.lse, plain.lse, name="lse")
    for name in ("dq", "dk", "dv"):
        check_close(
            gradients[name], getattr(good, name), getattr(usual, name), name=name, **options
        )
    if form.gradients is not None:
        exact_of, plain_of = (
            form.gradients(np.asarray(g.dbias, np.float64)) for g in (good, usual)
        )
        for name, gradient in exact_of.items():
            check_close(gradients[name], gradient, plain_of[name], dtype=x["q"].dtype, name=name)
