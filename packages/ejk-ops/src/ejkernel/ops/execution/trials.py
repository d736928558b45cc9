"""Records of tuning, and the comparison of a candidate's values with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.config.versions import today, versions_text

# Largest |a - b| / max(1, |a|, |b|) by which two configs may differ: rounding, nothing else.
BOUNDS = {"float64": 1e-12, "float32": 5e-3, "float16": 4e-3, "bfloat16": 2e-2}
BOUND_HIGHEST = 1e-5  # float32 when full precision was asked for
BOUND_NARROW = 2.5e-1  # float8 outputs: one step of a three-bit mantissa
GRADIENT_FACTOR = 4.0


BUDGET_SPENT = "the time budget was spent"
STOPPED = "tuning was stopped"
NOT_TRIED = "not tried: "


@dataclass(frozen=True)
class Trial:
    """One candidate.

    Attributes:
        cfg: the config.
        ms: milliseconds that rank it, None when it was not timed: of the forward pass, and of the
            backward pass too where gradients were timed.
        error: why it was skipped, None when it was not.
        fwd_ms: the forward pass alone.
        bwd_ms: milliseconds that the backward pass adds, None when not measured.
        spread: half the distance between the quartiles of the samples, relative to the median.
    """

    cfg: Any
    ms: float | None = None
    error: str | None = None
    fwd_ms: float | None = None
    bwd_ms: float | None = None
    spread: float | None = None


def failed(trial: Trial) -> bool:
    """Returns whether the candidate was tried and failed."""
    error = trial.error
    return bool(error) and error not in (BUDGET_SPENT, STOPPED) and not error.startswith(NOT_TRIED)


@dataclass(frozen=True)
class AutotuneResult:
    """Outcome of tuning one key.

    Attributes:
        kernel: the kernel.
        key: cache key of the call.
        best: the winning config.
        best_ms: its time, None when there was nothing to compare or another process measured.
        trials: every candidate, skipped ones included; the first is the heuristic config.
        seconds: how long it took.
        backward: whether gradients were validated and timed.
        interrupted: whether it was stopped before all candidates were measured.
        phases: seconds that "inputs", "compile" (with the first runs) and "time" took; of a
            search that shares the device, the first runs are a phase "check".
    """

    kernel: Any
    key: str
    best: Any
    best_ms: float | None
    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0
    backward: bool = False
    interrupted: bool = False
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def heuristic_ms(self) -> float | None:
        """Time of the heuristic config, None when it could not be measured."""
        return self.trials[0].ms if self.trials else None

    @property
    def timed(self) -> int:
        """Number of candidates that were timed."""
        return sum(t.ms is not None for t in self.trials)

    @property
    def compared(self) -> bool:
        """Returns whether ``best`` won against another one: the heuristic config, if it is valid.

        A config without a competitor, because the budget ended, is not worth keeping.
        """
        if not self.trials:  # another process measured
            return True
        return self.timed >= 2 and (self.heuristic_ms is not None or failed(self.trials[0]))

    @property
    def spread(self) -> float | None:
        """Spread of the winner's time."""
        return next((t.spread for t in self.trials if t.cfg == self.best), None)

    def measured(self) -> dict[str, Any]:
        """Returns the measurements to store with the config, as JSON; times in milliseconds."""
        return {
            "ms": self.best_ms,
            "heuristic_ms": self.heuristic_ms,
            "spread": self.spread,
            "pass": "fwd+bwd" if self.backward else "fwd",
            "candidates": len(self.trials),
            "timed": self.timed,
            "seconds": round(self.seconds, 2),
            "date": today(),
            "versions": versions_text(),
        }


def bound_of(dtype: Any, highest: bool) -> float:
    """The bound that applies to values of ``dtype``."""
    name = np.dtype(dtype).name
    if highest and name == "float32":
        return BOUND_HIGHEST
    return BOUNDS.get(name, BOUND_NARROW)


@jax.jit
def _differences(values: list[Any], references: list[Any]) -> list[tuple[Any, Any, Any]]:
    """``(largest |a - b|, largest |a| or |b|, whether infinities agree)`` of pairs of arrays."""
    return [_difference(a, b) for a, b in zip(values, references, strict=True)]


def _difference(value: Any, reference: Any) -> tuple[Any, Any, Any]:
    wide = jnp.promote_types(value.dtype, jnp.float32)
    a, b = value.astype(wide), reference.astype(wide)
    infinite = jnp.isinf(b)
    same = jnp.all(jnp.where(infinite, a == b, jnp.isfinite(a)))
    a, b = jnp.where(infinite, 0, a), jnp.where(infinite, 0, b)
    scale = jnp.maximum(jnp.max(jnp.abs(a), initial=0), jnp.max(jnp.abs(b), initial=0))
    return jnp.max(jnp.abs(a - b), initial=0), scale, same


@jax.jit
def _any_nan(values: list[Any]) -> list[Any]:
    return [jnp.any(jnp.isnan(x)) for x in values]


def unusable(tree: Any) -> str | None:
    """Returns why values cannot serve as a reference, NaN somewhere, or None."""
    leaves = [(i, x) for i, x in enumerate(jax.tree_util.tree_leaves(tree)) if _is_float(x)]
    for (index, _), has_nan in zip(leaves, _any_nan([x for _, x in leaves]), strict=True):
        if bool(has_nan):
            return f"output {index} holds NaN"
    return None


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def disagreement(
    value: Any, reference: Any, *, label: str = "output", factor: float = 1.0, highest: bool = False
) -> str | None:
    """Returns why ``value`` is not ``reference`` up to rounding; None when it is."""
    leaves, treedef = jax.tree_util.tree_flatten(value)
    expected, expected_treedef = jax.tree_util.tree_flatten(reference)
    if treedef != expected_treedef:
        return f"{label} has structure {treedef}, expected {expected_treedef}"
    floats: list[tuple[str, Any, Any]] = []
    for index, (a, b) in enumerate(zip(leaves, expected, strict=True)):
        name = f"{label} {index}" if len(leaves) > 1 else label
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
        if a.dtype == jax.dtypes.float0:
            continue
        if _is_float(a):
            floats.append((name, a, b))
        elif not bool(jnp.all(a == b)):
            return f"{name} has other values than the reference config"
    differences = _differences([a for _, a, _ in floats], [b for _, _, b in floats])
    for (name, a, _), (error, scale, finite) in zip(floats, differences, strict=True):
        if not bool(finite):
            return f"{name} is not finite where the reference config is"
        allowed = factor * bound_of(a.dtype, highest) * max(1.0, float(scale))
        if not float(error) <= allowed:
            return (
                f"{name} has other values than the reference config: "
                f"largest difference {float(error):.3g}, allowed {allowed:.3g}"
            )
    return None
