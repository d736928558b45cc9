"""Records of tuning, and the comparison of a candidate's values with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Largest |a - b| / max(1, |a|, |b|) by which two configs may differ: rounding, nothing else.
BOUNDS = {"float64": 1e-12, "float32": 5e-3, "float16": 4e-3, "bfloat16": 2e-2}
BOUND_HIGHEST = 1e-5  # float32 when full precision was asked for
BOUND_NARROW = 2.5e-1  # float8 outputs: one step of a three-bit mantissa
GRADIENT_FACTOR = 4.0


@dataclass(frozen=True)
class Trial:
    """One candidate.

    Attributes:
        cfg: the config.
        ms: milliseconds that rank it, None when it was not timed. Forward time; for configs
            without separate ``fwd_params`` and ``bwd_params``, forward plus backward time when
            gradients were validated.
        error: why it was skipped, None when it was not.
        fwd_ms: forward time.
        bwd_ms: what the backward pass adds to it, None when not measured.
    """

    cfg: Any
    ms: float | None = None
    error: str | None = None
    fwd_ms: float | None = None
    bwd_ms: float | None = None


@dataclass(frozen=True)
class AutotuneResult:
    """Outcome of tuning one key.

    Attributes:
        kernel: the kernel.
        key: cache key of the call.
        best: the winning config.
        best_ms: its time, None when there was nothing to compare.
        trials: every candidate, skipped ones included.
        seconds: how long it took.
        backward: whether gradients were validated.
    """

    kernel: Any
    key: str
    best: Any
    best_ms: float | None
    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0
    backward: bool = False


def bound_of(dtype: Any, highest: bool) -> float:
    """The bound that applies to values of ``dtype``."""
    name = np.dtype(dtype).name
    if highest and name == "float32":
        return BOUND_HIGHEST
    return BOUNDS.get(name, BOUND_NARROW)


def _difference(value: Any, reference: Any) -> tuple[float, float, bool]:
    """``(largest |a - b|, largest |a| or |b|, whether infinities agree)`` of two float arrays."""
    wide = jnp.promote_types(value.dtype, jnp.float32)
    a, b = value.astype(wide), reference.astype(wide)
    infinite = jnp.isinf(b)
    same = jnp.all(jnp.where(infinite, a == b, jnp.isfinite(a)))
    a, b = jnp.where(infinite, 0, a), jnp.where(infinite, 0, b)
    scale = jnp.maximum(jnp.max(jnp.abs(a), initial=0), jnp.max(jnp.abs(b), initial=0))
    return float(jnp.max(jnp.abs(a - b), initial=0)), float(scale), bool(same)


def unusable(tree: Any) -> str | None:
    """Why values cannot serve as a reference: NaN somewhere."""
    for index, leaf in enumerate(jax.tree_util.tree_leaves(tree)):
        if _is_float(leaf) and bool(jnp.any(jnp.isnan(leaf))):
            return f"output {index} holds NaN"
    return None


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def disagreement(
    value: Any, reference: Any, *, what: str = "output", factor: float = 1.0, highest: bool = False
) -> str | None:
    """Why ``value`` is not ``reference`` up to rounding; None when it is."""
    leaves, treedef = jax.tree_util.tree_flatten(value)
    expected, expected_treedef = jax.tree_util.tree_flatten(reference)
    if treedef != expected_treedef:
        return f"{what} has structure {treedef}, expected {expected_treedef}"
    for index, (a, b) in enumerate(zip(leaves, expected, strict=True)):
        name = f"{what} {index}" if len(leaves) > 1 else what
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
        if a.dtype == jax.dtypes.float0:
            continue
        if not _is_float(a):
            if not bool(jnp.all(a == b)):
                return f"{name} has other values than the reference config"
            continue
        error, scale, finite = _difference(a, b)
        if not finite:
            return f"{name} is not finite where the reference config is"
        allowed = factor * bound_of(a.dtype, highest) * max(1.0, scale)
        if not error <= allowed:
            return (
                f"{name} has other values than the reference config: "
                f"largest difference {error:.3g}, allowed {allowed:.3g}"
            )
    return None
