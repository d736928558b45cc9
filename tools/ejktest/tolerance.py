"""Tolerances derived from the arithmetic, not chosen.

An implementation may err at most ``factor`` times as much as the plain computation done in the
same dtype (in the worst of a few orders of addition), plus a rounding floor; besides, its
root-mean-square error relative to the reference is bounded, by ``factor`` times that of the plain
computation where the inputs alone cost it more than the bound. Every check prints what it
measured, so that a passing run shows its margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RMS_LIMIT = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-3, "float16": 2e-3}
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass(frozen=True)
class Error:
    """Largest absolute error, and RMS error over RMS of the reference."""

    max_abs: float
    rms_ratio: float

    def __str__(self) -> str:
        return f"max {self.max_abs:.3g}, rms ratio {self.rms_ratio:.3g}"


def as_float64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def measure(actual, reference) -> Error:
    """Error of ``actual`` against a float64 ``reference``; infinities must agree exactly."""
    a, r = as_float64(actual), as_float64(reference)
    if a.shape != r.shape:
        raise AssertionError(f"shape {a.shape}, expected {r.shape}")
    if np.isnan(a).any():
        raise AssertionError(f"{np.isnan(a).sum()} of {a.size} entries are NaN")
    if np.isnan(r).any():  # no error would be too large
        raise AssertionError(f"{np.isnan(r).sum()} of {r.size} entries of the reference are NaN")
    infinite = np.isinf(r)
    if not np.array_equal(a[infinite], r[infinite]) or np.isinf(a[~infinite]).any():
        raise AssertionError("infinities differ from the reference")
    d = np.where(infinite, 0.0, np.where(infinite, 0.0, a) - np.where(infinite, 0.0, r))
    r = np.where(infinite, 0.0, r)
    if d.size == 0:
        return Error(0.0, 0.0)
    rms = float(np.sqrt(np.mean(r**2)))
    error = float(np.sqrt(np.mean(d**2)))
    return Error(float(np.abs(d).max()), error / rms if rms > 0 else error)


def check_close(
    actual,
    reference,
    plain=None,
    *,
    dtype=None,
    factor: float = 2.0,
    rms_limit: float | None = None,
    name: str = "out",
) -> Error:
    """Hold ``actual`` to the float64 ``reference``.

    ``plain`` is the straightforward computation in the working dtype. With it, the largest error
    may be ``factor`` times that of ``plain`` plus a floor of four roundings of the largest value.
    Without it, only the RMS bound and a floor of 64 roundings apply.
    ``dtype`` is the working dtype (default: that of ``actual``).
    """
    key = np.dtype(dtype if dtype is not None else actual.dtype).name
    got = measure(actual, reference)
    ref = as_float64(reference)
    finite = ref[np.isfinite(ref)]
    scale = float(np.abs(finite).max()) if finite.size else 0.0
    eps = EPS[key]
    limit = RMS_LIMIT[key] if rms_limit is None else rms_limit
    if plain is None:
        bound = 64 * eps * max(scale, 1.0)
    else:
        usual = measure(plain, reference)
        bound = factor * usual.max_abs + 4 * eps * max(scale, 1e-3)
        limit = max(limit, factor * usual.rms_ratio)
    print(f"{name}: {got}; allowed max {bound:.3g}, rms ratio {limit:.3g}")
    if got.max_abs > bound:
        raise AssertionError(f"{name}: {got}: largest error above {bound:.3g}")
    # a reference that is all rounding noise has no meaningful ratio
    if got.rms_ratio > limit and got.max_abs > 4 * eps * max(scale, 1e-3):
        raise AssertionError(f"{name}: {got}: rms ratio above {limit:.3g}")
    return got
