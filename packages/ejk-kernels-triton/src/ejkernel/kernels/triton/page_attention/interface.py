"""The public function: arguments to canonical form, tiles, then the differentiable core."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.page_attention.core import Static, attend
from ejkernel.kernels.triton.page_attention.tiles import configured, problem_of, refusal
from ejkernel.kernels.triton.targets import current_target
from ejkernel.types import attention as arg
from ejkernel.types.structure import Unsupported


def page_attention(
    query,
    key_cache,
    value_cache,
    context_lens,
    block_tables,
    *,
    softmax_scale=None,
    logits_soft_cap=None,
    sliding_window=None,
    softmax_aux=None,
    k_scale=None,
    v_scale=None,
    num_splits=None,
    cfg=None,
):
    """Attention of one token per sequence over its paged cache, on a GPU.

    Row r stands at position ``i = context_lens[r] - 1`` and sees the keys ``j <= i`` (and inside
    the window), key j lying at ``cache[block_tables[r, j // page_size], j % page_size]``::

        x[j] = softmax_scale * k_scale * dot(query[r], key[j]);  x = cap * tanh(x / cap)
        lse = log(sum_j exp(x[j]) + sum over sinks of exp(softmax_aux))
        out[r] = v_scale * sum_j exp(x[j] - lse) * value[j]

    A context of 0 gives 0. Lengths are clipped to ``max_blocks * page_size``, table entries to
    the cache; memory past a context is never read.

    Args:
        query: float16, bfloat16 or float32 ``[b, 1, h, d]`` or ``[b, h, d]``.
        key_cache: ``[pages, page_size, hk, d]``, of those dtypes, int8, float8_e4m3fn or
            float8_e5m2; h is a multiple of hk, d and dv are multiples of 8 up to 256.
        value_cache: ``[pages, page_size, hk, dv]``; its dtype may be another.
        context_lens: integer ``[b]``. block_tables: integer ``[b, max_blocks]``.
        softmax_scale: static; default ``d ** -0.5``.
        logits_soft_cap: cap > 0, or None.
        sliding_window: ``w`` or ``(left, right)``; the left side counts.
        softmax_aux: sink logits ``[h, n]``, or ``[n]`` for all heads.
        k_scale, v_scale: float or float array ``[]`` or ``[hk]``; None = 1.
        num_splits: parts of every sequence (>= 1), beats ``cfg``. None: the cache as a whole is
            cut into equal parts, as many as fill the chip.
        cfg: ``num_splits``, ``pages_per_block`` (tokens of a step, rounded up to a power of two
            of at least 16), ``num_warps``, ``num_stages``.

    Returns:
        The query's rank and dtype, last axis dv. Two runs give the same bits.

    Differentiable in reverse mode in query, softmax_aux, the scales and caches of 16 or more
    bits, through the XLA implementation (package ejk-kernels-xla); 8-bit caches get no gradient.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: an illegal value.
        Unsupported: what ``supports`` gives a reason for.

    Source: Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180), section 4.1; Dao et al. 2023,
    "Flash-Decoding for long-context inference".
    """
    query, key_cache, value_cache = map(jnp.asarray, (query, key_cache, value_cache))
    q = query[:, 0] if query.ndim == 4 and query.shape[1] == 1 else query
    if q.ndim != 3 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise arg.invalid("query", "float[batch, 1, heads, head_dim] or [batch, heads, ...]", query)
    b, h, d = q.shape
    if key_cache.ndim != 4 or key_cache.shape[3] != d:
        raise arg.invalid("key_cache", f"cache[pages, page_size, kv_heads, {d}]", key_cache)
    if value_cache.ndim != 4 or value_cache.shape[:3] != key_cache.shape[:3]:
        expected = f"cache[{', '.join(map(str, key_cache.shape[:3]))}, value_dim] as the key cache"
        raise arg.invalid("value_cache", expected, value_cache)
    pages, page_size, hk, dv = value_cache.shape
    if (hk == 0 and h) or (hk and h % hk):
        raise arg.invalid("query", f"a number of heads that is a multiple of {hk}", query)
    reason = refusal(q, key_cache, value_cache)
    if reason is not None:
        raise Unsupported(reason)
    lens = _indices(context_lens, "context_lens", (b,))
    tables = _indices(block_tables, "block_tables", (b, None))
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits: must be at least 1, got {num_splits}")
    problem = problem_of(
        {
            "query": q,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_tables": tables,
            "softmax_scale": arg.scale_of(softmax_scale, d),
            "logits_soft_cap": arg.soft_cap_of(logits_soft_cap),
            "sliding_window": _window(sliding_window),
        }
    )
    if 0 in (b, h, dv, pages, page_size, tables.shape[1]):
        o = jnp.zeros((b, h, dv), query.dtype)
    else:
        o = attend(
            Static(problem, configured(problem, current_target(), cfg, num_splits)),
            q,
            key_cache,
            value_cache,
            lens,
            tables,
            arg.sink_array(softmax_aux, h),
            _scale(k_scale, "k_scale", hk),
            _scale(v_scale, "v_scale", hk),
        )
    return o if query.ndim == 3 else o[:, None]


def _indices(x: Any, name: str, shape: tuple[int | None, ...]) -> jax.Array:
    x = jnp.asarray(x)
    fits = len(x.shape) == len(shape) and all(
        n is None or n == m for n, m in zip(shape, x.shape, strict=True)
    )
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        form = ", ".join("max_blocks" if n is None else str(n) for n in shape)
        raise arg.invalid(name, f"integer[{form}]", x)
    return x.astype(jnp.int32)


def _window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    left, right = (window, window) if isinstance(window, int) else window
    if left < 0 or right < 0:
        raise ValueError(f"sliding_window: must not be negative, got {window}")
    return int(left), int(right)


def _scale(scale: Any, name: str, heads: int) -> jax.Array | None:
    """``[]`` or ``[hk]`` of a float dtype, or None."""
    if scale is None:
        return None
    array = jnp.asarray(scale, None if hasattr(scale, "dtype") else jnp.float32)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.shape not in ((), (heads,)):
        raise arg.invalid(name, f"a float, float[] or float[{heads}]", array)
    return array
