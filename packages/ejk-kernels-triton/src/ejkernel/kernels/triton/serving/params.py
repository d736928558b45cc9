"""Kernel parameters of Triton's kernels over a cache, from the problem of a call."""

from __future__ import annotations

from ejkernel.kernels.triton.common.dims import split_dim
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.types.attention.problem import LOG2E
from ejkernel.types.serving.problem import ITEMSIZE, PagedProblem


def compute_dtype(problem: PagedProblem, cache_dtype: str) -> str:
    """Returns the dtype of matmuls with a cache of ``cache_dtype``.

    8-bit caches are exact in float16, where probabilities (at most 1) and queries (scaled per row)
    are more exact than in bfloat16. Dtypes without a common 16-bit dtype use float32.
    """
    if problem.query_dtype != "float32" and ITEMSIZE.get(cache_dtype) == 1:
        return "float16"  # unsupported dtypes have no size, and are refused later
    return cache_dtype if cache_dtype == problem.query_dtype else "float32"


def needs_float32(problem: PagedProblem) -> bool:
    """Returns whether a matmul is in float32."""
    dtypes = (problem.key_dtype, problem.value_dtype)
    return "float32" in (compute_dtype(problem, dtype) for dtype in dtypes)


def column_parts(problem: PagedProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns (main, tail) of the columns of keys and of values, each a power of two or 0.

    The main part of latent keys are their values.
    """
    p = problem
    if p.layout.is_latent:
        tail = p.dim - p.value_dim
        tail = tail and max(power_of_two(tail), _min_columns(p.key_dtype))
        return (p.value_dim, tail), (p.value_dim, 0)
    return _split(p.dim, p.key_dtype), _split(p.value_dim, p.value_dtype)


def has_narrow_tail(problem: PagedProblem) -> bool:
    """Returns whether a tail has no more columns than a matmul needs."""
    (_, key_tail), (_, value_tail) = column_parts(problem)
    narrow_key, narrow_value = map(_min_columns, (problem.key_dtype, problem.value_dtype))
    return key_tail == narrow_key or value_tail == narrow_value


def _min_columns(cache_dtype: str) -> int:
    """Columns that a matmul needs; even and odd columns of 8-bit caches are separate matmuls."""
    return 32 if ITEMSIZE[cache_dtype] == 1 else 16


def _split(dim: int, cache_dtype: str) -> tuple[int, int]:
    (main, tail), least = split_dim(dim), _min_columns(cache_dtype)
    return max(main, least), tail and max(tail, least)


def layout_params(problem: PagedProblem) -> dict[str, int]:
    """Returns where heads of keys and values lie in a token.

    V_OFFSET counts elements as they are read: pairs of 8-bit values.
    """
    layout = problem.layout
    first = (layout.value_offset or 0) // (2 if ITEMSIZE[problem.value_dtype] == 1 else 1)
    return {
        "K_HEADS": layout.heads,
        "K_STEP": layout.key_stride,
        "V_HEADS": layout.heads,
        "V_STEP": layout.value_stride,
        "V_OFFSET": first,
    }


def logit_params(problem: PagedProblem) -> dict[str, float]:
    """Returns the factors from dot products to base-2 logits; the tanh of a cap takes base e."""
    cap = problem.soft_cap
    return {
        "scale": float(problem.scale if cap else problem.scale * LOG2E),
        "cap_in": float(2 * LOG2E / cap) if cap else 0.0,
        "cap_out": float(cap * LOG2E) if cap else 0.0,
    }
